//! `unbroken sdr`: reliable writes over lossy links, measured.

mod bench;
mod end;
mod peer;
mod probe;

use clap::{Args, Subcommand};
use unbroken_sdr_model::Scheme;
use unbroken_units::read;

use crate::model::scheme;
use crate::output::Result;
use crate::place::Place;
use unbroken_sdr::{Choice, Objective};

#[derive(Args)]
pub(crate) struct SdrArgs {
    #[command(subcommand)]
    command: SdrCommand,
}

#[derive(Subcommand)]
enum SdrCommand {
    /// Reliable writes from one host to another: throughput, times, what was sent again
    #[command(
        after_help = "Both ends are processes of this command. Faults are set beside it, or \
before. With --listen and --connect
the ends are on machines of their own, over UDP between their interfaces.

Examples:
  unbroken sdr bench
  unbroken fault set 'loss a/0 1% tx' && unbroken sdr bench --scheme mds:16,8 --rate 1G --verify
  unbroken sdr bench --scheme adaptive --size 8M --in-flight 16 --channels 2 --nics 0,1 --json
  unbroken sdr bench --listen 192.0.2.7:7601          at the far end
  unbroken sdr bench --connect 192.0.2.7:7601 --scheme adaptive
  unbroken run --devices mlx5_0 -- unbroken sdr bench --listen 192.0.2.7:7601"
    )]
    Bench(bench::BenchArgs),
    /// The other end of a bench
    #[command(hide = true)]
    BenchEnd(bench::BenchArgs),
    /// How much of plain UDP a way loses, over time and for several payloads; gives what `unbroken
    /// model` asks for
    #[command(
        after_help = "Sends at a bounded rate for a bounded time, and answers one question: what \
is lost.

Examples:
  unbroken sdr probe --listen 192.0.2.7:7600          at the far end
  unbroken sdr probe --to 192.0.2.7:7600 --rate 100M --trials 5
  unbroken sdr probe                                  both ends here, over loopback"
    )]
    Probe(probe::ProbeArgs),
}

/// Runs a subcommand.
pub(crate) fn sdr(place: &Place, args: &SdrArgs) -> Result {
    match &args.command {
        SdrCommand::Bench(args) => bench::bench(&place.make()?, args),
        SdrCommand::BenchEnd(args) => bench::serve(&place.make()?, args),
        SdrCommand::Probe(args) => probe::probe(args),
    }
}

/// A scheme of `unbroken model`, or the adaptive choice.
#[derive(Clone, Copy, Debug)]
struct Wanted(Choice);

impl Wanted {
    /// As it is asked for: `sr-nack`, `mds:16,8`, `adaptive`.
    fn word(self) -> String {
        match self.0 {
            Choice::Adaptive(_) => "adaptive".into(),
            Choice::Fixed(Scheme::Ec(code)) => {
                code.to_string().to_lowercase().replace('(', ":").replace([')', ' '], "")
            }
            Choice::Fixed(scheme) => scheme.to_string().to_lowercase(),
        }
    }
}

fn wanted(text: &str) -> std::result::Result<Wanted, String> {
    match text {
        "adaptive" => Ok(Wanted(Choice::Adaptive(Objective::Mean))),
        text => scheme(text)
            .map(|scheme| Wanted(Choice::Fixed(scheme)))
            .map_err(|e| format!("{e}; or adaptive")),
    }
}

/// A size that is a power of two; its logarithm.
fn power_of_two(text: &str) -> std::result::Result<u8, String> {
    let bytes = read::size(text)?;
    if !bytes.is_power_of_two() {
        return Err(format!("{bytes} bytes; a power of two is right, such as 64K"));
    }
    Ok(bytes.trailing_zeros() as u8)
}

//! `sim`: runs many schedules, prints what happened in them, and how to replay one that failed.
#![forbid(unsafe_code)]

use clap::Parser;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Mutex;
use std::time::Instant;
use unbroken_sim::flush::Flush;
use unbroken_sim::{run_with, Mutant, Stats};

/// Simulates failure schedules of logical QPs and checks that nothing is lost, repeated or stuck.
#[derive(Parser)]
#[command(name = "sim")]
struct Args {
    /// Schedules to run.
    #[arg(long, default_value_t = 10_000)]
    schedules: u64,
    /// The first seed; schedule n has seed S + n.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Threads.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Leave a rule out: no-quiesce, no-counts, early, no-follow, same-qpn, lost-receive,
    /// early-twice, place-early, no-check, no-witness, no-fence, fence-not-awaited,
    /// flush-let-through, count-kind-ignored, own-error-held, flush-trusted, flush-awaited,
    /// ended-revived, no-hysteresis, keys-not-translated.
    #[arg(long, value_parser = mutant)]
    mutant: Option<Mutant>,
    /// Run every mutant until it fails; each must.
    #[arg(long)]
    mutants: bool,
    /// How all plain devices flush: whole, lossy, sends-first, parked, slow-poll, no-recv-marker,
    /// at-destroy, nothing. Otherwise each QP in a way of its own.
    #[arg(long, value_parser = flush)]
    flush: Option<Flush>,
    /// Print all that happens (for one schedule).
    #[arg(long)]
    trace: bool,
}

fn mutant(name: &str) -> Result<Mutant, String> {
    if !cfg!(feature = "mutants") {
        return Err(WITHOUT_MUTANTS.into());
    }
    Mutant::from_name(name).ok_or_else(|| {
        let names: Vec<_> = Mutant::ALL.iter().map(|m| m.name()).collect();
        format!("there is no mutant of this name; there are {}", names.join(", "))
    })
}

fn flush(name: &str) -> Result<Flush, String> {
    Flush::from_name(name).ok_or_else(|| {
        let names = Flush::ALL.map(Flush::name).join(", ");
        format!("no device flushes so; there are {names}")
    })
}

const WITHOUT_MUTANTS: &str =
    "nothing can be left out: build with `--features unbroken-sim/mutants`";

/// What a batch of schedules came to: the counts, and the first violation with its seed.
type Outcome = (Stats, Option<(u64, String)>);

fn batch(args: &Args, mutant: Mutant) -> Outcome {
    let next = AtomicU64::new(0);
    let total = Mutex::new((Stats::default(), None::<(u64, String)>));
    let stop = AtomicU64::new(u64::MAX); // the lowest seed that failed
    std::thread::scope(|scope| {
        for _ in 0..args.threads.max(1) {
            scope.spawn(|| {
                let mut stats = Stats::default();
                loop {
                    let seed = args.seed + next.fetch_add(1, Ordering::Relaxed);
                    if seed >= args.seed + args.schedules || seed > stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let played =
                        std::panic::catch_unwind(|| run_with(seed, mutant, args.flush, args.trace));
                    match played.unwrap_or_else(|_| Err("panic".into())) {
                        Ok(s) => stats.add(&s),
                        Err(violation) => {
                            stop.fetch_min(seed, Ordering::Relaxed);
                            let mut total = total.lock().unwrap_or_else(|e| e.into_inner());
                            if total.1.as_ref().is_none_or(|(s, _)| seed < *s) {
                                total.1 = Some((seed, violation));
                            }
                            break;
                        }
                    }
                }
                total.lock().unwrap_or_else(|e| e.into_inner()).0.add(&stats);
            });
        }
    });
    total.into_inner().unwrap_or_else(|e| e.into_inner())
}

fn command(args: &Args, seed: u64, mutant: Mutant) -> String {
    let flush = args.flush.map_or(String::new(), |f| format!(" --flush {}", f.name()));
    let (features, with) = match mutant {
        Mutant::None => ("", String::new()),
        _ => (" --features unbroken-sim/mutants", format!(" --mutant {}", mutant.name())),
    };
    let one = format!("--seed {seed} --schedules 1 --threads 1 --trace{with}{flush}");
    format!("cargo run --release --bin sim{features} -- {one}")
}

fn main() -> ExitCode {
    let args = Args::parse();
    if args.mutants && !cfg!(feature = "mutants") {
        eprintln!("sim: {WITHOUT_MUTANTS}");
        return ExitCode::from(2);
    }
    if args.mutants {
        return mutants(&args);
    }
    let mutant = args.mutant.unwrap_or(Mutant::None);
    let began = Instant::now();
    let (stats, violation) = batch(&args, mutant);
    let seconds = began.elapsed().as_secs_f64();
    println!(
        "{} schedules in {seconds:.1} s: {:.0} per second",
        stats.schedules,
        stats.schedules as f64 / seconds
    );
    for (name, value, floor) in stats.rows() {
        println!("{name:>18} {value:>10}   (at least {floor})");
    }
    if let Some((seed, violation)) = violation {
        println!(
            "VIOLATION in schedule {seed}: {violation}\nreplay it: {}",
            command(&args, seed, mutant)
        );
        return ExitCode::FAILURE;
    }
    let missing = stats.below_floor();
    if args.schedules >= 1_000 && !missing.is_empty() {
        println!("too little happened: {} below the floor", missing.join(", "));
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// Runs each mutant until a schedule fails.
fn mutants(args: &Args) -> ExitCode {
    let mut survivors = 0;
    std::panic::set_hook(Box::new(|_| {}));
    for &mutant in Mutant::ALL {
        let (stats, violation) = batch(args, mutant);
        match violation {
            Some((seed, what)) => {
                println!(
                    "{:>11}: caught after {} schedules: {what}\n             {}",
                    mutant.name(),
                    seed - args.seed + 1,
                    command(args, seed, mutant)
                );
            }
            None => {
                println!("{:>11}: NOT CAUGHT in {} schedules", mutant.name(), stats.schedules);
                survivors += 1;
            }
        }
    }
    if survivors == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

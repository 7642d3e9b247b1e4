//! Erasure codes on one core: encoding and recovering with our fastest kernel beside ISA-L's
//! `ec_encode_data`, and XOR beside a copy.
//!
//! The code is the paper's, 32 data and 8 parity chunks of 64 KiB. Each is measured with one
//! submessage over and over (2.5 MiB, so it stays in the cache) and along a message of 64 MiB,
//! which does not. ISA-L is given tables that were made before; ours counts all that
//! [`Code::recover_region`] does, finding the coefficients included. The figure is data (32 chunks
//! a submessage) over the time that the thread had its core (CPU time), since others may use the
//! machine, too.

use std::hint::black_box;
use std::io::Write;
use std::sync::Mutex;
use std::time::Duration;

use rustix::time::{clock_gettime, ClockId};

use unbroken_erasure::{Backend, ChunkSet, Code, Kernel};
use unbroken_erasure_isal::{IsaL, Tables};

use crate::report::{median, Better, Entry};
use crate::Result;

/// The code's chunks.
pub const DATA: usize = 32;
/// Its parity chunks.
pub const PARITY: usize = 8;
/// Bytes of a chunk.
pub const CHUNK: usize = 64 << 10;
/// A sample goes on for so long.
const SAMPLE: Duration = Duration::from_millis(40);
const COMMAND: &str = "unbroken-bench codes";
const ISAL: &str = "ISA-L's ec_encode_data";

/// A message and its parity.
pub struct Message {
    data: Vec<u8>,
    parity: Vec<u8>,
}

impl Message {
    /// So many submessages, of bytes that look random.
    pub fn new(submessages: usize) -> Message {
        let mut state = 1_u64;
        let mut word = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state ^ state >> 29).to_ne_bytes()
        };
        let data = (0..submessages * DATA * CHUNK / 8).flat_map(|_| word()).collect();
        Message { data, parity: vec![0; submessages * PARITY * CHUNK] }
    }

    /// Goes through it once, by submessages: data and parity.
    fn each(&mut self, mut act: impl FnMut(&mut [u8], &mut [u8])) {
        for (data, parity) in self
            .data
            .chunks_exact_mut(DATA * CHUNK)
            .zip(self.parity.chunks_exact_mut(PARITY * CHUNK))
        {
            act(data, parity);
        }
    }

    /// Does it for a while, and gives Gbit/s of data.
    pub fn sample(&mut self, mut act: impl FnMut(&mut [u8], &mut [u8])) -> f64 {
        let (started, mut passes) = (cpu_time(), 0);
        loop {
            self.each(&mut act);
            passes += 1;
            let took = cpu_time() - started;
            if took >= SAMPLE {
                return (8 * passes * self.data.len()) as f64 / took.as_secs_f64() / 1e9;
            }
        }
    }
}

/// How long this thread has had a core.
pub fn cpu_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// A backend that keeps the coefficients of the last call: what ISA-L is to multiply by.
#[derive(Default)]
struct Listener(Mutex<Vec<u8>>);

impl Backend for Listener {
    fn name(&self) -> &'static str {
        "listener"
    }

    fn combine(&self, coefficients: &[u8], _: &[&[u8]], _: &mut [&mut [u8]]) {
        if let Ok(mut kept) = self.0.lock() {
            *kept = coefficients.to_vec();
        }
    }
}

/// What a submessage does once.
type Act<'a> = Box<dyn FnMut(&mut [u8], &mut [u8]) + 'a>;

/// Two that do the same.
struct Rivals<'a> {
    metric: String,
    ours: Act<'a>,
    peer: &'static str,
    theirs: Act<'a>,
    bar: f64,
}

/// All entries, measured in so many rounds.
pub fn run(rounds: u32) -> Result<Vec<Entry>> {
    let isal = IsaL::load()?;
    let mut entries = Vec::new();
    for (where_, submessages) in [("in the cache", 1), ("in memory", 32)] {
        let mut message = Message::new(submessages);
        for mut rivals in rivals(&isal, submessages)? {
            print!("{}, {where_} … ", rivals.metric);
            let _ = std::io::stdout().flush();
            let (mut ours, mut theirs) = (Vec::new(), Vec::new());
            for round in 0..rounds {
                // A B B A, then B A A B, so that what drifts favours neither.
                let turns = if round % 2 == 0 {
                    [true, false, false, true]
                } else {
                    [false, true, true, false]
                };
                let mut sums = [0.0, 0.0];
                for us in turns {
                    let act = if us { &mut rivals.ours } else { &mut rivals.theirs };
                    sums[usize::from(us)] += message.sample(act) / 2.0;
                }
                theirs.push(sums[0]);
                ours.push(sums[1]);
            }
            let value = median(&ours).ok_or("no rounds")?;
            println!("{value:.0} Gbit/s");
            let bench = format!("codes ({DATA}, {PARITY}), 64 KiB chunks, {where_}");
            let entry =
                Entry::new(&bench, &rivals.metric, value, "Gbit/s", Better::Higher, COMMAND);
            entries.extend(
                entry.beside_rounds(rivals.peer, &ours, &theirs).map(|e| e.bar(rivals.bar)),
            );
        }
    }
    Ok(entries)
}

fn rivals(isal: &IsaL, submessages: usize) -> Result<Vec<Rivals<'_>>> {
    let (mds, xor) = (Code::mds(DATA, PARITY)?, Code::xor(DATA, PARITY)?);
    let mut rivals = vec![encoding(isal, mds)?];
    for losses in [1, 4, 8] {
        rivals.push(recovering(isal, mds, losses)?);
    }
    rivals.push(Rivals {
        metric: "XOR, encode".into(),
        ours: Box::new(move |data, parity| {
            done(xor.encode_region(&Kernel::best(), data, parity, CHUNK))
        }),
        peer: "a copy of the data",
        theirs: copying(submessages),
        bar: 0.7,
    });
    Ok(rivals)
}

/// Copies each submessage to a place of its own.
fn copying<'a>(submessages: usize) -> Act<'a> {
    let (mut copy, mut turn) = (vec![0; submessages * DATA * CHUNK], 0);
    Box::new(move |data, _| {
        black_box(&mut copy[turn * DATA * CHUNK..][..DATA * CHUNK]).copy_from_slice(data);
        turn = (turn + 1) % submessages;
    })
}

/// What cannot fail here: sizes are constants of this file.
pub fn done<T, E: std::fmt::Debug>(result: std::result::Result<T, E>) {
    let _ = black_box(result.expect("chunks of the right sizes"));
}

/// What ISA-L multiplies by where `ask` has a code multiply.
fn tables<T, E: std::error::Error + 'static>(
    isal: &IsaL,
    ask: impl FnOnce(&Listener) -> std::result::Result<T, E>,
) -> Result<Tables> {
    let listener = Listener::default();
    ask(&listener)?;
    let coefficients = listener.0.into_inner().map_err(|_| "a panic")?;
    Ok(isal.tables(&coefficients, DATA))
}

/// Encoding with ISA-L's function, for which tables were made before.
pub fn encode_with_isal(isal: &IsaL) -> Result<impl Fn(&mut [u8], &mut [u8]) + '_> {
    let code = Code::mds(DATA, PARITY)?;
    let tables = tables(isal, |l| code.encode_region(l, &[0; DATA], &mut [0; PARITY], 1))?;
    Ok(move |data: &mut [u8], parity: &mut [u8]| {
        let inputs: Vec<&[u8]> = data.chunks(CHUNK).collect();
        isal.combine_prepared(&tables, &inputs, &mut parity.chunks_mut(CHUNK).collect::<Vec<_>>());
    })
}

fn encoding(isal: &IsaL, code: Code) -> Result<Rivals<'_>> {
    Ok(Rivals {
        metric: "MDS, encode".into(),
        ours: Box::new(move |data, parity| {
            done(code.encode_region(&Kernel::best(), data, parity, CHUNK))
        }),
        peer: ISAL,
        theirs: Box::new(encode_with_isal(isal)?),
        bar: 1.0,
    })
}

fn recovering(isal: &IsaL, code: Code, losses: usize) -> Result<Rivals<'_>> {
    // Spread over the submessage, as losses are.
    let lost: ChunkSet = (0..losses).map(|i| i * DATA / losses).collect();
    let tables = tables(isal, |l| code.recover_region(l, &mut [0; DATA], &[0; PARITY], 1, &lost))?;
    Ok(Rivals {
        metric: format!("MDS, recover {losses}"),
        ours: Box::new(move |data, parity| {
            done(code.recover_region(&Kernel::best(), data, parity, CHUNK, &lost))
        }),
        peer: ISAL,
        theirs: Box::new(move |data, parity| {
            let (mut inputs, mut outputs): (Vec<&[u8]>, Vec<&mut [u8]>) = Default::default();
            for (chunk, bytes) in data.chunks_mut(CHUNK).enumerate() {
                if lost.contains(chunk) {
                    outputs.push(bytes);
                } else {
                    inputs.push(bytes);
                }
            }
            inputs.extend(parity.chunks(CHUNK).take(losses));
            isal.combine_prepared(&tables, &inputs, &mut outputs);
        }),
        bar: 1.0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both do the same, so that it is the same work that is compared.
    #[test]
    fn rivals_leave_the_same_bytes() {
        let isal = IsaL::load().unwrap();
        let mut message = Message::new(1);
        for mut rivals in rivals(&isal, 1).unwrap() {
            if rivals.peer != ISAL {
                continue;
            }
            let before = message.data.clone();
            message.each(&mut rivals.ours);
            let parity = message.parity.clone();
            let recovers = rivals.metric.contains("recover");
            if recovers {
                message.data[..CHUNK].fill(0);
            } else {
                message.parity.fill(0);
            }
            message.each(&mut rivals.theirs);
            assert!(message.data == before && message.parity == parity, "{}", rivals.metric);
        }
    }
}

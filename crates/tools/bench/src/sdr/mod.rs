//! SDR: how fast bitmaps are kept, with completions fed by a stub in place of a device; and
//! reliable writes over softnic beside writes over RC, with both ends in this process.
//!
//! The comparison with RC is made twice: at half of what RC reaches here, where the network's rate
//! bounds both, and unbounded, where the cores do.

pub mod bitmap;
pub mod writes;

use std::io::Write;

use crate::report::{median, Better, Entry};
use crate::Result;
use writes::{Pair, Setting};

const COMMAND: &str = "unbroken-bench sdr";

/// All entries, measured in so many rounds.
pub fn run(rounds: u32) -> Result<Vec<Entry>> {
    let mut entries = vec![bitmaps(rounds)?];
    if let Some(scaling) = scaling(rounds)? {
        entries.push(scaling);
    }
    entries.extend(beside_rc(rounds)?);
    Ok(entries)
}

fn bitmaps(rounds: u32) -> Result<Entry> {
    print!("bitmaps … ");
    let _ = std::io::stdout().flush();
    let rates: Vec<f64> = (0..rounds).map(|_| bitmap::packets_per_s(1) / 1e6).collect();
    let value = median(&rates).ok_or("no rounds")?;
    println!("{value:.0} million packets/s");
    let entry = Entry::new(
        "SDR bitmaps, stub device",
        "one worker",
        value,
        "M packets/s",
        Better::Higher,
        COMMAND,
    );
    Ok(entry.of_rounds(&rates).bar(10.0))
}

/// As many workers as there are cores, beside one.
fn scaling(rounds: u32) -> Result<Option<Entry>> {
    let cores = std::thread::available_parallelism()?.get().min(16);
    if cores < 2 {
        return Ok(None);
    }
    let of = |workers: usize| -> Vec<f64> {
        (0..rounds).map(|_| bitmap::packets_per_s(workers) / 1e6).collect()
    };
    let (many, one) = (of(cores), of(1));
    let value = median(&many).ok_or("no rounds")?;
    let metric = format!("{cores} workers");
    let entry = Entry::new(
        "SDR bitmaps, stub device",
        &metric,
        value,
        "M packets/s",
        Better::Higher,
        COMMAND,
    );
    Ok(entry.beside_rounds("one worker", &many, &one))
}

fn beside_rc(rounds: u32) -> Result<Vec<Entry>> {
    let pair = Pair::new(&Setting::default())?;
    let samples = |rate: bool| -> Result<(Vec<f64>, Vec<f64>)> {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            print!("SDR and RC{}, round {round} … ", if rate { ", at a rate" } else { "" });
            let _ = std::io::stdout().flush();
            // A B B A
            let sums = [pair.sdr_gbps()?, pair.rc_gbps()?, pair.rc_gbps()?, pair.sdr_gbps()?];
            ours.push((sums[0] + sums[3]) / 2.0);
            theirs.push((sums[1] + sums[2]) / 2.0);
            println!("{:.2} and {:.2} Gbit/s", ours[ours.len() - 1], theirs[theirs.len() - 1]);
        }
        Ok((ours, theirs))
    };
    let entry = |metric: &str, (ours, theirs): &(Vec<f64>, Vec<f64>)| {
        let value = median(ours)?;
        let name = "SDR writes (SR-NACK), 512 KiB, 16 in flight";
        Entry::new(name, metric, value, "Gbit/s", Better::Higher, COMMAND).beside_rounds(
            "RC writes",
            ours,
            theirs,
        )
    };
    let free = samples(false)?;
    let ceiling = median(&free.1).ok_or("no rounds")?;
    pair.limit(ceiling / 2.0)?;
    let limited = samples(true)?;
    let at_rate = entry("the network at half of RC's ceiling", &limited).map(|e| e.bar(0.95));
    Ok(at_rate.into_iter().chain(entry("no rate", &free)).collect())
}

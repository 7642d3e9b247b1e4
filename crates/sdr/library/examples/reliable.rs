//! A reliable write over a lossy network, by erasure coding, between two hosts of the emulated
//! network in one process.
//!
//! ```text
//! cargo run --release --example reliable
//! ```

use std::time::{Duration, Instant};
use unbroken::Host;
use unbroken_sdr::{
    Choice, Code, Context, ContextOptions, Error, Qp, QpOptions, Reliable, ReliableOptions, Result,
    Scheme,
};

const BYTES: usize = 1 << 20;
const MESSAGES: u8 = 16;

/// One end: NICs with their workers, and a queue pair.
struct End {
    context: Context,
    qp: Qp,
}

impl End {
    fn new(folder: &std::path::Path, name: &str) -> Result<End> {
        let context = Context::open(&Host::bare(folder, name)?, &ContextOptions::default())?;
        let qp = context.create_qp(&QpOptions::default())?;
        Ok(End { context, qp })
    }
}

fn main() -> Result<()> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (a, b) = (End::new(folder.path(), "a")?, End::new(folder.path(), "b")?);
    // What each says of itself may come to the other by any way.
    a.qp.connect(&b.qp.info())?;
    b.qp.connect(&a.qp.info())?;

    // 16 chunks of data are followed by 8 of parity: any 8 of the 24 may be lost.
    let code = Code::mds(16, 8).expect("a code");
    let options = ReliableOptions {
        choice: Choice::Fixed(Scheme::Ec(code)),
        parity: 0.5,
        rate_bps: 1_000_000_000,
        ..ReliableOptions::default()
    };
    let (sender, receiver) = (Reliable::new(&a.qp, &options)?, Reliable::new(&b.qp, &options)?);
    let (from, into) = (a.context.register(BYTES)?, b.context.register(BYTES)?);

    // One packet in a hundred is lost: with 16 packets a chunk, one chunk in seven.
    let fabric = unbroken_fabric::Runtime::at(folder.path())
        .map(|runtime| unbroken_fabric::Fabric::open(&runtime));
    let fabric = fabric.expect("the runtime folder").expect("the emulated network");
    fabric.set(&"loss a/0 1% tx".parse().expect("a fault"), None).expect("a fault");

    let began = Instant::now();
    for message in 0..MESSAGES {
        from.write(0, &vec![message + 1; BYTES])?;
        let read = receiver.read(&into, 0, BYTES as u64)?;
        let write = sender.write(&from, 0, BYTES as u64)?;
        write.wait(Duration::from_secs(20))?;
        read.wait(Duration::from_secs(20))?;
        if into.read(0, BYTES)? != vec![message + 1; BYTES] {
            return Err(Error::Wrong(format!("message {message} has wrong bytes")));
        }
    }
    let (sent, got) = (sender.counts(), receiver.counts());
    println!(
        "{MESSAGES} messages of 1 MiB in {:?}: {} chunks sent, {} recovered from parity, {} sent \
         again",
        began.elapsed(),
        sent.chunks,
        got.recovered,
        sent.repeated
    );
    Ok(())
}

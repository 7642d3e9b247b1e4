//! Bitmaps with a stub in place of a device: its completions are immediates that follow each other
//! as packets do.

use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use crate::codes::cpu_time;

use unbroken_sdr_protocol::attr::{Attr, Layout};
use unbroken_sdr_protocol::board::Board;
use unbroken_sdr_protocol::imm::Fields;
use unbroken_sdr_protocol::receives::{Keys, Receives};

/// A sample takes about so long.
const SAMPLE: Duration = Duration::from_millis(150);
/// Completions between two entries into a gate, as a worker takes them from a queue.
const BATCH: usize = 64;

/// No memory: nothing is written.
struct NoKeys;

impl Keys<()> for NoKeys {
    type Error = ();
    fn point(&mut self, _: u8, _: u32, _: &()) -> Result<(), ()> {
        Ok(())
    }
    fn clear(&mut self, _: u8, _: u32) -> Result<(), ()> {
        Ok(())
    }
}

/// Completions a second that so many workers bring into bitmaps, each of a channel of its own:
/// packets of 4 KiB, chunks of 64 KiB, 16 messages of 16 MiB, posting and completing included. By
/// the CPU time of the workers, since others may use the machine, too: so much where each has a
/// core of its own.
pub fn packets_per_s(workers: usize) -> f64 {
    let attr = Attr {
        in_flight_log2: 28,
        messages_log2: 4,
        channels: workers as u8,
        packet_lifetime_us: 0,
        ..Attr::default()
    };
    let layout = Layout::new(&attr).expect("attributes that fit");
    let board = Board::new(&layout);
    let receives = Mutex::new(Receives::new(&layout));
    let packets = layout.packets_of(layout.message_bytes);
    let of_channel = |channel: usize| -> Vec<u32> {
        (0..packets)
            .filter(|at| (at / layout.chunk_packets) as usize % workers == channel)
            .collect()
    };
    let offsets: Vec<Vec<u32>> = (0..workers).map(of_channel).collect();
    let (barrier, began) = (Barrier::new(workers), Instant::now());
    let (rounds, cpu) = (Mutex::new(0u64), Mutex::new(Duration::ZERO));
    std::thread::scope(|scope| {
        for channel in 0..workers {
            let (board, receives, barrier, offsets) =
                (&board, &receives, &barrier, &offsets[channel]);
            let (rounds, cpu) = (&rounds, &cpu);
            scope.spawn(move || loop {
                if barrier.wait().is_leader() {
                    next_messages(board, &mut receives.lock().expect("no panic"));
                }
                barrier.wait();
                let first = receives.lock().expect("no panic").next() - u64::from(layout.slots);
                work(board, channel as u8, first, offsets);
                if barrier.wait().is_leader() {
                    *rounds.lock().expect("no panic") += 1;
                }
                // All see the same, since nobody is past the next barrier.
                let over = began.elapsed() >= SAMPLE;
                if barrier_agrees(barrier, over, rounds) {
                    *cpu.lock().expect("no panic") += cpu_time();
                    return;
                }
            });
        }
    });
    let rounds = rounds.into_inner().expect("no panic") & !OVER;
    let each_s = cpu.into_inner().expect("no panic").as_secs_f64() / workers as f64;
    (rounds * u64::from(layout.slots) * u64::from(packets)) as f64 / each_s
}

/// The mark that the workers are to stop.
const OVER: u64 = 1 << 63;

/// Whether one of the workers says that it is over; all get the same answer.
fn barrier_agrees(barrier: &Barrier, over: bool, rounds: &Mutex<u64>) -> bool {
    if over {
        *rounds.lock().expect("no panic") |= OVER;
    }
    barrier.wait();
    *rounds.lock().expect("no panic") & OVER != 0
}

/// Completes the messages of all slots, and posts the next.
fn next_messages(board: &Board, receives: &mut Receives) {
    let (layout, next) = (*board.layout(), receives.next());
    for seq in next.saturating_sub(layout.slots.into())..next {
        let whole = receives.complete(0, seq, board, &mut NoKeys);
        assert_eq!(whole, Ok(true));
    }
    for _ in 0..layout.slots {
        receives.post(0, layout.message_bytes, &(), board, &mut NoKeys).expect("a free slot");
    }
}

/// What a worker does with the completions of its channel.
fn work(board: &Board, channel: u8, first: u64, offsets: &[u32]) {
    let layout = board.layout();
    let split = layout.attr().split;
    for seq in first..first + u64::from(layout.slots) {
        let (slot, generation) = (layout.slot(seq), layout.generation(seq));
        for batch in offsets.chunks(BATCH) {
            let _gate = board.enter(channel);
            for offset in batch {
                std::hint::black_box(
                    board.arrive(generation, split.pack(Fields { slot, offset: *offset, user: 0 })),
                );
            }
        }
    }
}

//! Figure 11: what MDS costs and what XOR loses.
//!
//! Encoding is measured on this machine, with as many threads as it has cores, each on a message of
//! its own; the paper measured on another one (Xeon Platinum 8580, 4 GHz). When a code falls back
//! is the model's.

use std::sync::{Arc, Barrier};

use unbroken_chart::{Axis, Figure, Line, Lines, Look, Marker, Panel, Unit};
use unbroken_erasure::{Code, Kernel};
use unbroken_erasure_isal::IsaL;
use unbroken_sdr_model::Scheme;
use unbroken_units::show::power_of_ten as loss;

use super::setting::{line, mds, spread, xor, Reading, MIB};
use super::{Drawing, Published};
use crate::codes::{encode_with_isal, Message, CHUNK, DATA, PARITY};
use crate::Result;

/// Submessages of a message of 128 MiB.
const SUBMESSAGES: usize = 64;
/// The link that encoding is to keep up with.
const LINK_GBPS: f64 = 400.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Encoder {
    Mds,
    Xor,
    IsaL,
}

/// What threads that encode at once do together, in Gbit/s of data.
fn together(encoder: Encoder, threads: usize) -> Result<f64> {
    let isal = if encoder == Encoder::IsaL { Some(IsaL::load()?) } else { None };
    let isal = Arc::new(isal);
    let (begin, codes) =
        (Arc::new(Barrier::new(threads)), (Code::mds(DATA, PARITY)?, Code::xor(DATA, PARITY)?));
    let workers: Vec<_> = (0..threads)
        .map(|_| {
            let (isal, begin) = (isal.clone(), begin.clone());
            std::thread::spawn(move || {
                let mut message = Message::new(SUBMESSAGES);
                let tables =
                    isal.as_ref().as_ref().map(encode_with_isal).transpose().ok().flatten();
                begin.wait();
                message.sample(|data, parity| match (encoder, &tables) {
                    (Encoder::IsaL, Some(encode)) => encode(data, parity),
                    (Encoder::Xor, _) => crate::codes::done(codes.1.encode_region(
                        &Kernel::best(),
                        data,
                        parity,
                        CHUNK,
                    )),
                    _ => crate::codes::done(codes.0.encode_region(
                        &Kernel::best(),
                        data,
                        parity,
                        CHUNK,
                    )),
                })
            })
        })
        .collect();
    workers
        .into_iter()
        .map(|worker| worker.join().map_err(|_| "a thread that encoded panicked".into()))
        .sum()
}

/// The best of some tries: others share this machine's cores.
fn best(encoder: Encoder, threads: usize) -> Result<f64> {
    (0..5).map(|_| together(encoder, threads)).try_fold(0.0, |best: f64, next| Ok(best.max(next?)))
}

pub(super) fn figure_11() -> Result<Drawing> {
    let cores = std::thread::available_parallelism()?.get();
    let measure = |encoder| -> Result<Vec<(f64, f64)>> {
        (1..=cores).map(|n| Ok((n as f64, best(encoder, n)?))).collect()
    };
    let (of_mds, of_xor, of_isal) =
        (measure(Encoder::Mds)?, measure(Encoder::Xor)?, measure(Encoder::IsaL));
    let most = cores.max(8) as f64;
    let fastest = of_mds.iter().chain(&of_xor).map(|(_, gbps)| 1.1 * gbps).fold(0.0, f64::max);
    let mut lines = vec![
        Line::new("400 Gbit/s", 5, vec![(0.0, LINK_GBPS), (most, LINK_GBPS)]).looking(Look::Dotted),
        Line::new("XOR(32, 8)", 3, of_xor.clone()),
        Line::new("MDS(32, 8)", 2, of_mds.clone()),
    ];
    if let Ok(points) = &of_isal {
        lines.push(Line::new("MDS(32, 8) by ISA-L", 0, points.clone()).looking(Look::Dashed));
    }
    lines.push(
        Line::new(
            "published: 400 Gbit/s with 4 cores (XOR), 8 (MDS)",
            4,
            vec![(4.0, LINK_GBPS), (8.0, LINK_GBPS)],
        )
        .looking(Look::Marks),
    );
    let encoding = Lines {
        title: "encoding 128 MiB, measured on this machine".into(),
        x: Axis::linear("threads", 0.0, most + 0.5, Unit::Plain),
        y: Axis::linear("data encoded", 0.0, fastest.max(1.25 * LINK_GBPS), Unit::Gbps),
        lines,
        markers: Vec::new(),
    };
    let needed =
        |points: &[(f64, f64)]| points.first().map_or(f64::NAN, |(_, gbps)| LINK_GBPS / gbps);
    let cores_needed =
        |points: &[(f64, f64)]| format!("{:.1} (by the speed of one)", needed(points));
    let row = |what: &str, published: &str, ours: String| Published {
        figure: 11,
        what: what.into(),
        published: published.into(),
        per_packet: ours.clone(),
        per_chunk: ours,
    };
    let mut published = vec![
        row("cores that encode XOR(32, 8) at 400 Gbit/s", "4", cores_needed(&of_xor)),
        row("cores that encode MDS(32, 8) at 400 Gbit/s", "8", cores_needed(&of_mds)),
    ];
    if let Ok(points) = &of_isal {
        published.push(row("the same with ISA-L", "8", cores_needed(points)));
    }
    let (fallback, more) = fallback();
    published.extend(more);
    let figure = Figure {
        title: "SDR-RDMA, Figure 11: MDS against XOR, 64 KiB chunks".into(),
        panels: vec![Panel::Lines(encoding), fallback],
        columns: 2,
        notes: published
            .iter()
            .take(3)
            .map(|p| format!("{}: published {}; here {}.", p.what, p.published, p.per_packet))
            .collect(),
    };
    Ok(Drawing { figure, published })
}

/// How likely 128 MiB fall back to Selective Repeat.
fn fallback() -> (Panel, Vec<Published>) {
    let of = |reading: Reading, scheme: Scheme, p: f64| {
        let link = reading.link(p);
        let Scheme::Ec(code) = scheme else { return f64::NAN };
        link.channel()
            .map_or(f64::NAN, |c| Scheme::coding(&c, code).fallback(link.chunks(128 * MIB)))
    };
    let losses = spread(1e-5, 1e-1, 80);
    let both = [("XOR(32, 8)", 3, xor()), ("MDS(32, 8)", 2, mds())];
    let lines = both.iter().flat_map(|(name, colour, scheme)| {
        [
            line(name, *colour, &losses, |p| of(Reading::Chunk, *scheme, p)),
            line(&format!("{name}, loss of packets"), *colour, &losses, |p| {
                of(Reading::Packet, *scheme, p)
            })
            .looking(Look::Dashed),
        ]
    });
    let panel = Panel::Lines(Lines {
        title: "128 MiB fall back to SR".into(),
        x: Axis::log("loss", 1e-5, 1e-1, Unit::Probability),
        y: Axis::log("probability", 1e-4, 1.0, Unit::Probability),
        lines: lines.collect(),
        markers: vec![
            Marker { x: 1e-3, words: "XOR, published".into() },
            Marker { x: 1e-2, words: "MDS, published: beyond".into() },
        ],
    });
    // Where one write in a thousand falls back: it is then the p99.9 that shows it.
    let from = |reading: Reading, scheme: Scheme| {
        let first = spread(1e-6, 1e-1, 400).into_iter().find(|p| of(reading, scheme, *p) > 1e-3);
        first.map_or("nowhere".into(), loss)
    };
    let row = |name: &str, scheme: Scheme, published: &str| Published {
        figure: 11,
        what: format!("loss from which on one write in 1000 of 128 MiB falls back, {name}"),
        published: published.into(),
        per_packet: from(Reading::Packet, scheme),
        per_chunk: from(Reading::Chunk, scheme),
    };
    (panel, vec![row("XOR", xor(), "about 10⁻³"), row("MDS", mds(), "beyond 10⁻²")])
}

//! Figures 14 to 16: what the SDK does. On softnic, both ends on this machine's cores; the packet
//! rate with a stub in place of a device.

use unbroken_chart::{Axis, Figure, Line, Lines, Look, Marker, Panel, Unit};
use unbroken_sdr_model::chunk_loss;
use unbroken_units::show::power_of_ten as loss;

use super::{Drawing, Published};
use crate::report::median;
use crate::sdr::bitmap;
use crate::sdr::writes::{Pair, Setting};
use crate::Result;

/// Each point is the median of so many samples.
const SAMPLES: usize = 3;

fn published(figure: u32, what: &str, theirs: &str, ours: String) -> Published {
    Published {
        figure,
        what: what.into(),
        published: theirs.into(),
        per_packet: ours.clone(),
        per_chunk: ours,
    }
}

fn middle(mut sample: impl FnMut() -> Result<f64>) -> Result<f64> {
    let samples = (0..SAMPLES).map(|_| sample()).collect::<Result<Vec<f64>>>()?;
    Ok(median(&samples).unwrap_or(f64::NAN))
}

fn panel(title: &str, x: Axis, y: (&str, f64, Unit), lines: Vec<Line>) -> Panel {
    let y = Axis::linear(y.0, 0.0, 1.1 * y.1, y.2);
    Panel::Lines(Lines { title: title.into(), x, y, lines, markers: Vec::new() })
}

fn highest(points: &[(f64, f64)]) -> f64 {
    points.iter().map(|(_, y)| *y).fold(0.0, f64::max)
}

fn gbps(highest: f64) -> (&'static str, f64, Unit) {
    ("throughput", highest, Unit::Gbps)
}

/// Throughput over message size, beside RC, and over channels.
pub(super) fn figure_14() -> Result<Drawing> {
    let (mut sdr, mut rc) = (Vec::new(), Vec::new());
    for bytes in (14..=23).map(|n| 1u64 << n) {
        let pair = Pair::new(&Setting {
            bytes,
            chunk_log2: bytes.trailing_zeros().min(16) as u8,
            ..Setting::default()
        })?;
        sdr.push((bytes as f64, middle(|| pair.sdr_gbps())?));
        rc.push((bytes as f64, middle(|| pair.rc_gbps())?));
    }
    let of_channels = |channels: u8| -> Result<(f64, f64)> {
        let pair = Pair::new(&Setting { bytes: 4 << 20, channels, ..Setting::default() })?;
        Ok((channels.into(), middle(|| pair.sdr_gbps())?))
    };
    let channels = [1, 2, 4].map(of_channels).into_iter().collect::<Result<Vec<_>>>()?;
    let share = |bytes: f64| {
        let at = |points: &[(f64, f64)]| {
            points.iter().find(|(x, _)| *x == bytes).map_or(f64::NAN, |(_, y)| *y)
        };
        at(&sdr) / at(&rc)
    };
    let rows = vec![published(
        14,
        "SDR's throughput over RC's: 16 KiB, 512 KiB, 8 MiB",
        "below 1 under 512 KiB, 1 from there on",
        format!("{:.2}, {:.2}, {:.2}", share(16384.0), share(524_288.0), share(8_388_608.0)),
    )];
    let top = highest(&sdr).max(highest(&rc));
    let sizes = Axis::log("message", sdr[0].0, sdr[sdr.len() - 1].0, Unit::Bytes);
    let lines = vec![
        Line::new("SDR, SR-NACK", 1, sdr.clone()),
        Line::new("RC writes", 5, rc.clone()).looking(Look::Dashed),
    ];
    let over = highest(&channels);
    let figure = Figure {
        title: "SDR-RDMA, Figure 14: throughput, 16 writes in flight, chunks of 64 KiB. On \
                softnic, both ends on this machine"
            .into(),
        panels: vec![
            panel("one channel", sizes, gbps(top), lines),
            panel(
                "4 MiB",
                Axis::linear("channels", 0.0, 4.5, Unit::Plain),
                gbps(over),
                vec![Line::new("SDR, SR-NACK", 1, channels)],
            ),
        ],
        columns: 2,
        notes: vec!["Without loss but where the receiver's socket overflows. A softnic has one \
                     engine, so channels on one NIC share its lock."
            .into()],
    };
    Ok(Drawing { figure, published: rows })
}

/// Throughput and loss over the size of a chunk.
pub(super) fn figure_15() -> Result<Drawing> {
    let of_chunk = |chunk_log2: u8| -> Result<(f64, f64)> {
        let pair = Pair::new(&Setting { bytes: 4 << 20, chunk_log2, ..Setting::default() })?;
        Ok((f64::from(1u32 << chunk_log2), middle(|| pair.sdr_gbps())?))
    };
    let speeds = (12..=20).step_by(2).map(of_chunk).collect::<Result<Vec<_>>>()?;
    let lost: Vec<(f64, f64)> =
        speeds.iter().map(|(x, _)| (*x, chunk_loss(1e-5, (*x / 4096.0) as u64))).collect();
    let sizes = || Axis::log("chunk", speeds[0].0, speeds[speeds.len() - 1].0, Unit::Bytes);
    let row = published(
        15,
        "loss of a chunk of 16 packets, loss of packets 10⁻⁵",
        "1.6·10⁻⁴",
        loss(chunk_loss(1e-5, 16)),
    );
    let lost = Lines {
        title: "loss of a chunk, loss of packets 10⁻⁵".into(),
        x: sizes(),
        y: Axis::log("probability", 1e-6, 1e-2, Unit::Probability),
        lines: vec![Line::new("chunk", 2, lost)],
        markers: vec![Marker { x: 65536.0, words: "default".into() }],
    };
    let figure = Figure {
        title: "SDR-RDMA, Figure 15: size of a chunk. On softnic, both ends on this machine".into(),
        panels: vec![
            panel(
                "4 MiB, 16 in flight",
                sizes(),
                gbps(highest(&speeds)),
                vec![Line::new("SDR, SR-NACK", 1, speeds.clone())],
            ),
            Panel::Lines(lost),
        ],
        columns: 2,
        notes: Vec::new(),
    };
    Ok(Drawing { figure, published: vec![row] })
}

/// Packets a second over workers.
pub(super) fn figure_16() -> Result<Drawing> {
    let cores = std::thread::available_parallelism()?.get();
    let points: Vec<(f64, f64)> = (1..=cores.clamp(2, 16))
        .map(|n| Ok((n as f64, middle(|| Ok(bitmap::packets_per_s(n) / 1e6))?)))
        .collect::<Result<_>>()?;
    let row = published(
        16,
        "million packets a second",
        "above 90 with 128 DPA threads",
        format!(
            "{:.0} with one thread of a CPU, {:.0} with {} (stub device)",
            points[0].1, points[1].1, points[1].0
        ),
    );
    let x = Axis::linear("workers", 0.0, points.len() as f64 + 0.5, Unit::Plain);
    let lines = vec![Line::new("bitmaps", 1, points.clone())];
    let figure = Figure {
        title: "SDR-RDMA, Figure 16: packet rate. Completions come from a stub, not from a device"
            .into(),
        panels: vec![panel(
            &format!("{cores} cores"),
            x,
            ("million packets/s", highest(&points), Unit::Plain),
            lines,
        )],
        columns: 1,
        notes: Vec::new(),
    };
    Ok(Drawing { figure, published: vec![row] })
}

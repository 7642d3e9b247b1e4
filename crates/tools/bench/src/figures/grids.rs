//! Figures 9 and 13: where erasure coding pays, for single writes and for ring all-reduce.

use unbroken_chart::{Figure, Heat, Panel};
use unbroken_sdr_model::{Lots, Ring, Scheme};
use unbroken_units::show::{bytes, power_of_ten};

use super::setting::{mds, mean, tail, time_s, Of, Reading, MIB, READINGS};
use super::{Drawing, Published};
use crate::Result;

/// Samples of a ring: the p99.9 is the 21st from above.
const SAMPLES: usize = 20_000;

/// Powers of the root of ten, from 10^-8 on.
fn losses(count: u32) -> Vec<f64> {
    (0..count).map(|n| 10_f64.powf(-8.0 + f64::from(n) / 2.0)).collect()
}

/// The name of a loss; those between two decades have none.
fn decade(p: f64) -> String {
    let power = p.log10();
    if (power - power.round()).abs() < 0.1 {
        power_of_ten(p)
    } else {
        String::new()
    }
}

fn heat(
    title: String,
    y_label: &str,
    losses: &[f64],
    rows: Vec<String>,
    values: Vec<Vec<f64>>,
) -> Panel {
    Panel::Heat(Heat {
        title,
        x_label: "loss".into(),
        y_label: y_label.into(),
        columns: losses.iter().map(|p| decade(*p)).collect(),
        rows,
        values: values
            .into_iter()
            .map(|row| row.into_iter().map(|ratio| ratio.is_finite().then_some(ratio)).collect())
            .collect(),
    })
}

/// The speed-up of EC-MDS(32, 8) over SR-RTO by message and loss.
pub(super) fn figure_9() -> Result<Drawing> {
    let losses = losses(15);
    let sizes: Vec<u64> = (17..=35).step_by(2).map(|power| 1 << power).collect();
    let ratio = |reading: Reading, of: Of, p: f64, size: u64| {
        let link = reading.link(p);
        time_s(Scheme::SrRto, &link, size, of) / time_s(mds(), &link, size, of)
    };
    let mut panels = Vec::new();
    for reading in READINGS {
        for (name, of) in [("mean", mean as Of), ("p99.9", tail)] {
            let values = sizes
                .iter()
                .map(|size| losses.iter().map(|p| ratio(reading, of, *p, *size)).collect())
                .collect();
            let rows = sizes.iter().map(|size| bytes(*size as f64)).collect();
            panels.push(heat(
                format!("{name}, {}", reading.name()),
                "message",
                &losses,
                rows,
                values,
            ));
        }
    }
    // Where the mean is better by a tenth at least.
    let range = |reading: Reading| {
        let pays = |size: u64| {
            losses
                .iter()
                .any(|p| *p >= 0.99e-6 && *p <= 1.01e-2 && ratio(reading, mean, *p, size) > 1.1)
        };
        let paying: Vec<u64> = sizes.iter().copied().filter(|size| pays(*size)).collect();
        match (paying.first(), paying.last()) {
            (Some(least), Some(most)) => {
                format!("{} to {}", bytes(*least as f64), bytes(*most as f64))
            }
            _ => "nowhere".into(),
        }
    };
    let published = vec![Published {
        figure: 9,
        what:
            "messages for which EC's mean is better (here: by a tenth) somewhere from 10⁻⁶ to 10⁻²"
                .into(),
        published: "128 KiB to 1 GiB".into(),
        per_packet: range(Reading::Packet),
        per_chunk: range(Reading::Chunk),
    }];
    let figure = Figure {
        title: "SDR-RDMA, Figure 9: speed-up of EC-MDS(32, 8) over SR-RTO at 400 Gbit/s and 25 ms"
            .into(),
        panels,
        columns: 2,
        notes: vec!["Red: EC is faster. Blue: SR is.".into()],
    };
    Ok(Drawing { figure, published })
}

/// The p99.9 of ring all-reduce, in seconds.
fn ring_tail_s(reading: Reading, p: f64, scheme: Scheme, size: u64, datacentres: usize) -> f64 {
    let link = reading.link(p);
    let Ok(channel) = link.channel() else { return f64::NAN };
    let ring = Ring::new(&channel, scheme, link.chunks(size), datacentres);
    // The same lots for all, so that figures do not change from run to run.
    ring.draw_many_s(SAMPLES, &mut Lots::new(13))[SAMPLES * 999 / 1000]
}

/// The speed-up of ring all-reduce at p99.9, by datacentres (128 MiB) and by buffer (4
/// datacentres).
pub(super) fn figure_13() -> Result<Drawing> {
    let losses: Vec<f64> = losses(13).split_off(4);
    let ratio = |reading, p, size, datacentres| {
        ring_tail_s(reading, p, Scheme::SrRto, size, datacentres)
            / ring_tail_s(reading, p, mds(), size, datacentres)
    };
    let mut panels = Vec::new();
    let mut four = Vec::new();
    for reading in READINGS {
        let counts = [2, 4, 6, 8];
        let values: Vec<Vec<f64>> = counts
            .iter()
            .map(|n| losses.iter().map(|p| ratio(reading, *p, 128 * MIB, *n)).collect())
            .collect();
        four.push(values[1].clone());
        let rows = counts.iter().map(|n| n.to_string()).collect();
        panels.push(heat(
            format!("128 MiB, {}", reading.name()),
            "datacentres",
            &losses,
            rows,
            values,
        ));
        let sizes: Vec<u64> = (23..=33).step_by(2).map(|power| 1 << power).collect();
        let values = sizes
            .iter()
            .map(|size| losses.iter().map(|p| ratio(reading, *p, *size, 4)).collect())
            .collect();
        let rows = sizes.iter().map(|size| bytes(*size as f64)).collect();
        panels.push(heat(
            format!("4 datacentres, {}", reading.name()),
            "buffer",
            &losses,
            rows,
            values,
        ));
    }
    let range = |row: &[f64]| {
        let upto = row
            .iter()
            .zip(&losses)
            .filter(|(_, p)| (0.99e-6..1.01e-2).contains(*p))
            .map(|(ratio, _)| *ratio);
        let (low, high) = upto
            .fold((f64::INFINITY, 0.0_f64), |(low, high), ratio| (low.min(ratio), high.max(ratio)));
        format!("{low:.1}x to {high:.1}x")
    };
    let published = vec![Published {
        figure: 13,
        what: "speed-up at p99.9, 128 MiB over 4 datacentres, loss 10⁻⁶ to 10⁻²".into(),
        published: "3x to more than 6x".into(),
        per_packet: range(&four[0]),
        per_chunk: range(&four[1]),
    }];
    let figure = Figure {
        title: "SDR-RDMA, Figure 13: p99.9 speed-up of ring all-reduce, EC-MDS(32, 8) over SR-RTO"
            .into(),
        panels,
        columns: 2,
        notes: vec![format!("Each cell from {SAMPLES} samples. Red: EC is faster. Blue: SR is.")],
    };
    Ok(Drawing { figure, published })
}

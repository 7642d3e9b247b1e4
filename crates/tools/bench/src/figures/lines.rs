//! Figures 3, 10 and 12: times over message, loss, distance, bandwidth.

use unbroken_chart::{Axis, Figure, Line, Lines, Look, Marker, Panel, Unit};
use unbroken_erasure::Code;
use unbroken_sdr_model::{Link, Scheme};
use unbroken_units::show::{bytes, power_of_ten as loss};

use super::setting::{
    coded, line, mds, mean, slowdown, spread, tail, time_s, xor, Of, Reading, GIB, MIB, READINGS,
};
use super::{Drawing, Published};
use crate::Result;

const POINTS: u32 = 60;
/// The paper's loss where it is fixed.
const LOSS: f64 = 1e-5;

fn lines(title: String, x: Axis, y: Axis, lines: Vec<Line>) -> Panel {
    Panel::Lines(Lines { title, x, y, lines, markers: Vec::new() })
}

/// One colour a scheme, in all figures.
fn four() -> [(&'static str, usize, Scheme); 4] {
    [
        ("SR-RTO", 0, Scheme::SrRto),
        ("SR-NACK", 1, Scheme::SrNack),
        ("EC-MDS(32, 8)", 2, mds()),
        ("EC-XOR(32, 8)", 3, xor()),
    ]
}

/// The three panels of Figure 3.
fn panels_of_3(reading: Reading) -> [Panel; 3] {
    let two = [four()[0], four()[2]];
    let y = || Axis::log("mean time over lossless time", 0.9, 12.0, Unit::Plain);
    let of = |x: &[f64], at: &dyn Fn(Scheme, f64) -> f64| {
        two.map(|(name, colour, scheme)| line(name, colour, x, |place| at(scheme, place))).to_vec()
    };
    let sizes = spread(128.0 * 1024.0, (256 * GIB) as f64, POINTS);
    let distances = spread(10.0, 40_000.0, POINTS);
    let losses = spread(1e-8, 1e-2, POINTS);
    let far = |km: f64| Link { rtt_s: Link::rtt_of_distance_s(km * 1e3), ..reading.link(LOSS) };
    let over_distances = of(&distances, &|s, km| slowdown(s, &far(km), 8 * GIB, mean));
    // Published: from 10^-4 on times grow from 3x to 10x; above 32 GiB SR hides what it sends
    // again.
    let mut over_losses = of(&losses, &|s, p| slowdown(s, &reading.link(p), 128 * MIB, mean));
    over_losses
        .push(Line::new("published", 4, vec![(1e-4, 3.0), (1e-2, 10.0)]).looking(Look::Marks));
    let name = reading.name();
    [
        Panel::Lines(Lines {
            title: format!("(a) 3750 km, {name} 10⁻⁵"),
            x: Axis::log("message", sizes[0], sizes[sizes.len() - 1], Unit::Bytes),
            y: y(),
            lines: of(&sizes, &|s, x| slowdown(s, &reading.link(LOSS), x as u64, mean)),
            markers: vec![Marker { x: (32 * GIB) as f64, words: "published".into() }],
        }),
        lines(
            format!("(b) 8 GiB, {name} 10⁻⁵"),
            Axis::log("distance (km)", 10.0, 40_000.0, Unit::Plain),
            y(),
            over_distances,
        ),
        lines(
            format!("(c) 128 MiB, 3750 km, {name}"),
            Axis::log("loss", 1e-8, 1e-2, Unit::Probability),
            y(),
            over_losses,
        ),
    ]
}

/// Impact of reliability on message time at 400 Gbit/s.
pub(super) fn figure_3() -> Result<Drawing> {
    let high = |reading: Reading, p| slowdown(Scheme::SrRto, &reading.link(p), 128 * MIB, mean);
    let crossing = |reading: Reading| {
        let larger = spread(GIB as f64, (256 * GIB) as f64, 400).into_iter().find(|size| {
            let of = |scheme| time_s(scheme, &reading.link(LOSS), *size as u64, mean);
            of(Scheme::SrRto) < of(mds())
        });
        larger.map_or("nowhere".into(), bytes)
    };
    let published = vec![
        Published {
            figure: 3,
            what: "SR's mean time over lossless time, 128 MiB, loss 10⁻⁴ to 10⁻²".into(),
            published: "3x to 10x".into(),
            per_packet: format!(
                "{:.1}x to {:.1}x",
                high(Reading::Packet, 1e-4),
                high(Reading::Packet, 1e-2)
            ),
            per_chunk: format!(
                "{:.1}x to {:.1}x",
                high(Reading::Chunk, 1e-4),
                high(Reading::Chunk, 1e-2)
            ),
        },
        Published {
            figure: 3,
            what: "message from which on SR is faster than EC, 3750 km, loss 10⁻⁵".into(),
            published: "above 32 GiB".into(),
            per_packet: crossing(Reading::Packet),
            per_chunk: crossing(Reading::Chunk),
        },
    ];
    let figure = Figure {
        title: "SDR-RDMA, Figure 3: impact of reliability on message time at 400 Gbit/s".into(),
        panels: READINGS.into_iter().flat_map(panels_of_3).collect(),
        columns: 3,
        notes: notes(&published),
    };
    Ok(Drawing { figure, published })
}

/// What is published, as sentences below a figure.
fn notes(published: &[Published]) -> Vec<String> {
    let note = |p: &Published| {
        let published = match p.published.as_str() {
            "" => String::new(),
            published => format!("published {published}; "),
        };
        format!("{}: {published}here {} (packets), {} (chunks).", p.what, p.per_packet, p.per_chunk)
    };
    published.iter().map(note).collect()
}

/// The largest ratio of SR's time to EC's over losses up to 10^-2, 128 MiB, and its loss.
fn peak(reading: Reading, of: Of) -> (f64, f64) {
    let ratio = |p: f64| {
        let time = |scheme| time_s(scheme, &reading.link(p), 128 * MIB, of);
        time(Scheme::SrRto) / time(mds())
    };
    let all = spread(1e-6, 1e-2, 120).into_iter().map(|p| (ratio(p), p));
    all.fold((0.0, 0.0), |best, next| if next.0 > best.0 { next } else { best })
}

/// The largest slowdown of SR at a loss of 10^-5, over sizes, and the size: what the text says of
/// Figure 10a.
fn peak_over_sizes(reading: Reading, of: Of) -> (f64, u64) {
    let at = |x: f64| (slowdown(Scheme::SrRto, &reading.link(LOSS), x as u64, of), x as u64);
    let all = spread(128.0 * 1024.0, (32 * GIB) as f64, 120).into_iter().map(at);
    all.fold((0.0, 0), |best, next| if next.0 > best.0 { next } else { best })
}

/// A size of a grid, whose steps are a tenth, with two digits in the unit that it is shown in.
fn two_digits(size: f64) -> f64 {
    let unit = 1024_f64.powf(size.log(1024.0).floor());
    let step = 10_f64.powf((size / unit).log10().floor() - 1.0);
    (size / unit / step).round() * step * unit
}

/// The loss from which on EC takes longer than SR, 128 MiB; none up to three tenths.
fn ineffective_from(reading: Reading) -> Option<f64> {
    let is_slower = |p: &f64| {
        let time = |scheme| time_s(scheme, &reading.link(*p), 128 * MIB, mean);
        time(Scheme::SrRto) < time(mds())
    };
    spread(1e-3, 0.3, 120).into_iter().find(is_slower)
}

/// The four panels of Figure 10, and one of ratios.
fn panels_of_10(reading: Reading) -> [Panel; 5] {
    let name = reading.name();
    let sizes = spread(128.0 * 1024.0, (32 * GIB) as f64, POINTS);
    let losses = spread(1e-7, 3e-2, POINTS);
    let x = || Axis::log("loss", 1e-7, 3e-2, Unit::Probability);
    let y = |what: &str, high| {
        Axis::log(&format!("{what} time over lossless time"), 0.9, high, Unit::Plain)
    };
    let at_size = |s, x: f64, of| slowdown(s, &reading.link(LOSS), x as u64, of);
    let over_sizes = four().map(|(name, colour, s)| {
        let tails = line("", colour, &sizes, |x| at_size(s, x, tail));
        [line(name, colour, &sizes, |x| at_size(s, x, mean)), tails.looking(Look::Dashed)]
    });
    let at_loss = |s, p, of| slowdown(s, &reading.link(p), 128 * MIB, of);
    let means =
        four().map(|(name, colour, s)| line(name, colour, &losses, |p| at_loss(s, p, mean)));
    let tails =
        four().map(|(name, colour, s)| line(name, colour, &losses, |p| at_loss(s, p, tail)));
    // The paper's split has its colour; the others have those that are free.
    let splits =
        [(32, 2, 4), (32, 4, 5), (32, 8, 2), (32, 16, 6), (16, 16, 7)].map(|(k, m, colour)| {
            line(&format!("EC-MDS({k}, {m})"), colour, &losses, |p| {
                at_loss(coded(Code::mds(k, m)), p, mean)
            })
        });
    let axis = Axis::log("message", sizes[0], sizes[sizes.len() - 1], Unit::Bytes);
    [
        lines(format!("(a) {name} 10⁻⁵"), axis, y("", 20.0), over_sizes.concat()),
        lines(format!("(b) 128 MiB, mean, {name}"), x(), y("mean", 30.0), means.to_vec()),
        lines(format!("(c) 128 MiB, p99.9, {name}"), x(), y("p99.9", 30.0), tails.to_vec()),
        lines(format!("(d) 128 MiB, splits, {name}"), x(), y("mean", 30.0), splits.to_vec()),
        ratios(reading, &losses),
    ]
}

/// Writes of all sizes, and 128 MiB over losses: schemes, tails, splits.
pub(super) fn figure_10() -> Result<Drawing> {
    let shown = |reading, of| {
        let (ratio, p) = peak(reading, of);
        format!("{ratio:.1}x at {}", loss(p))
    };
    let row = |what: &str, published: &str, of: Of| Published {
        figure: 10,
        what: what.into(),
        published: published.into(),
        per_packet: shown(Reading::Packet, of),
        per_chunk: shown(Reading::Chunk, of),
    };
    let slowed = |what: &str, published: &str, of: Of| {
        let at = |reading| {
            let (ratio, size) = peak_over_sizes(reading, of);
            format!("{ratio:.1}x at {}", bytes(two_digits(size as f64)))
        };
        let (per_packet, per_chunk) = (at(Reading::Packet), at(Reading::Chunk));
        let (what, published) = (what.into(), published.into());
        Published { figure: 10, what, published, per_packet, per_chunk }
    };
    let from = |reading| {
        ineffective_from(reading).map_or("not up to 30 %".into(), |p| format!("from {}", loss(p)))
    };
    let published = vec![
        slowed("largest slowdown of SR-RTO's mean over sizes, loss 10⁻⁵ (10a)", "6.5x", mean),
        slowed("the same at p99.9", "12.2x", tail),
        row("SR-RTO's mean time over EC's, 128 MiB, largest up to a loss of 10⁻² (10b)", "", mean),
        row("the same at p99.9 (10c)", "", tail),
        Published {
            figure: 10,
            what: "loss at which EC is ineffective, here: slower than SR-RTO, 128 MiB".into(),
            published: "above 0.1 %".into(),
            per_packet: from(Reading::Packet),
            per_chunk: from(Reading::Chunk),
        },
    ];
    let mut notes = notes(&published);
    notes.push(
        "The paper's own E[T_EC], which it calls a lower bound, is drawn over the mean; for other \
         messages it is up to 1.7 times the mean. Dashed in (a), and all of (c): p99.9."
            .into(),
    );
    let [packets, chunks] = READINGS;
    let figure = Figure {
        title: "SDR-RDMA, Figure 10: writes at 400 Gbit/s over 3750 km".into(),
        panels: std::iter::zip(panels_of_10(packets), panels_of_10(chunks))
            .flat_map(|(of_packets, of_chunks)| [of_packets, of_chunks])
            .collect(),
        columns: 2,
        notes,
    };
    Ok(Drawing { figure, published })
}

/// SR's time over EC's, and the paper's own estimate of EC's mean over the mean.
fn ratios(reading: Reading, losses: &[f64]) -> Panel {
    let ratio = |of: Of| {
        move |p: f64| {
            let time = |scheme| time_s(scheme, &reading.link(p), 128 * MIB, of);
            time(Scheme::SrRto) / time(mds())
        }
    };
    let estimate = |p: f64| {
        let link = reading.link(p);
        let Scheme::Ec(code) = mds() else { return f64::NAN };
        let chunks = link.chunks(128 * MIB);
        link.channel().map_or(f64::NAN, |channel| {
            let coding = Scheme::coding(&channel, code);
            coding.paper_mean_s(chunks) / coding.message(chunks).mean_s()
        })
    };
    let all = vec![
        line("SR-RTO over EC, mean", 0, losses, ratio(mean)),
        line("SR-RTO over EC, p99.9", 0, losses, ratio(tail)).looking(Look::Dashed),
        line("the paper's E[T_EC] over EC's mean", 5, losses, estimate).looking(Look::Dotted),
    ];
    let axis = Axis::log("loss", losses[0], losses[losses.len() - 1], Unit::Probability);
    lines(
        format!("128 MiB, ratios, {}", reading.name()),
        axis,
        Axis::linear("ratio", 0.0, 14.0, Unit::Plain),
        all,
    )
}

/// Distance and bandwidth, for 128 MiB; and for 8 GiB, where "EC would eventually surpass SR".
pub(super) fn figure_12() -> Result<Drawing> {
    let mut panels = Vec::new();
    let three = [four()[0], four()[1], four()[2]];
    let distances = spread(10.0, 40_000.0, POINTS);
    let rates = spread(25.0, 6400.0, POINTS);
    for reading in READINGS {
        for (bytes, size) in [(128 * MIB, "128 MiB"), (8 * GIB, "8 GiB")] {
            let far =
                |km: f64| Link { rtt_s: Link::rtt_of_distance_s(km * 1e3), ..reading.link(LOSS) };
            let fast = |gbps: f64| Link { bandwidth_bps: gbps * 1e9, ..reading.link(LOSS) };
            let of = |x: &[f64], link: &dyn Fn(f64) -> Link| {
                three
                    .map(|(name, colour, s)| {
                        line(name, colour, x, |at| slowdown(s, &link(at), bytes, mean))
                    })
                    .to_vec()
            };
            let y = || Axis::linear("mean time over lossless time", 0.9, 3.5, Unit::Plain);
            let name = reading.name();
            let axis = Axis::log("distance (km)", 10.0, 40_000.0, Unit::Plain);
            panels.push(lines(
                format!("{size}, 400 Gbit/s, {name} 10⁻⁵"),
                axis,
                y(),
                of(&distances, &far),
            ));
            let axis = Axis::log("bandwidth", 25.0, 6400.0, Unit::Gbps);
            panels.push(lines(
                format!("{size}, 3750 km, {name} 10⁻⁵"),
                axis,
                y(),
                of(&rates, &fast),
            ));
        }
    }
    let surpassed = |reading: Reading| {
        let beyond = spread(100.0, 100_000.0, 300).into_iter().find(|km| {
            let link = Link { rtt_s: Link::rtt_of_distance_s(km * 1e3), ..reading.link(LOSS) };
            time_s(mds(), &link, 8 * GIB, mean) < time_s(Scheme::SrRto, &link, 8 * GIB, mean)
        });
        beyond.map_or("nowhere".into(), |km| format!("beyond {km:.0} km"))
    };
    let published = vec![Published {
        figure: 12,
        what: "where EC is faster than SR for 8 GiB, loss 10⁻⁵, 400 Gbit/s".into(),
        published: "\"eventually\", with more RTT".into(),
        per_packet: surpassed(Reading::Packet),
        per_chunk: surpassed(Reading::Chunk),
    }];
    let figure = Figure {
        title: "SDR-RDMA, Figure 12: distance and bandwidth".into(),
        panels,
        columns: 2,
        notes: notes(&published),
    };
    Ok(Drawing { figure, published })
}

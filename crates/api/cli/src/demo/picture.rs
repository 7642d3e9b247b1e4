//! The throughput of each NIC over time, with failover and without.

use unbroken_chart::{Axis, DrawError, Figure, Line, Lines, Marker, Panel, Unit};

use super::stream::{moved_us, Stream};
use super::FAULT;

/// A point of the curves stands for so long.
const BIN_US: u64 = 50_000;
/// The colours of NICs, one for each.
const COLOURS: [usize; 4] = [2, 3, 7, 4];

/// Both runs, one above the other, over the same time and the same rates.
pub(crate) fn draw(with: &Stream, without: &Stream) -> Result<String, DrawError> {
    let runs = [Run::of(with), Run::of(without)];
    let span_s = runs.iter().map(Run::span_s).fold(1.0, f64::max);
    let full_gbps = runs.iter().map(Run::highest).fold(1.0, f64::max) * 1.05;
    let titles = [
        format!("with failover: {}", outcome(with)),
        format!("without failover: {}", outcome(without)),
    ];
    let panels = runs.into_iter().zip(titles);
    let figure = Figure {
        title: format!("Throughput of each NIC over time; {FAULT} in mid-stream"),
        panels: panels.map(|(run, title)| run.panel(title, span_s, full_gbps)).collect(),
        columns: 1,
        notes: Vec::new(),
    };
    figure.svg()
}

fn outcome(stream: &Stream) -> String {
    let status = stream.client.status.map_or("no exit".into(), |s| format!("exit status {s}"));
    let (Some(switch), Some(gap_ms)) = (stream.switch(), stream.gap_ms()) else { return status };
    let back = match (stream.way_back(), stream.back_gap_ms()) {
        (Some(_), Some(gap_ms)) => format!("; back, {gap_ms:.1} ms"),
        (Some(_), None) => "; and back".into(),
        (None, _) => String::new(),
    };
    format!(
        "{status}; {} to {}, {gap_ms:.1} ms without data at the receiver{back}",
        switch.from, switch.to
    )
}

/// The fault, where the NIC was healed, and where the stream went back to it.
fn markers(stream: &Stream) -> Vec<Marker> {
    let mark = |at_us, words: &str| Marker { x: stream.seconds(at_us), words: words.into() };
    let fault = mark(stream.fault_us, FAULT);
    let healed = stream.healed_us.map(|at_us| mark(at_us, "healed"));
    let back = stream.way_back().map(|switch| mark(moved_us(switch), "back"));
    [Some(fault), healed, back].into_iter().flatten().collect()
}

/// A run as curves.
struct Run {
    /// Times in s since the first data; a rate in Gbit/s for each NIC.
    points: Vec<(f64, Vec<f64>)>,
    /// The NICs that it shows.
    nics: Vec<usize>,
    markers: Vec<Marker>,
}

impl Run {
    fn of(stream: &Stream) -> Run {
        let bins = stream.watch.bins(BIN_US);
        let points =
            bins.into_iter().map(|(end_us, rates)| (stream.seconds(end_us - BIN_US / 2), rates));
        let points = points.filter(|(t, _)| *t >= 0.0).collect();
        Run { points, nics: stream.nics_used().collect(), markers: markers(stream) }
    }

    fn span_s(&self) -> f64 {
        self.points.last().map_or(0.0, |(t, _)| *t)
    }

    fn highest(&self) -> f64 {
        self.points.iter().flat_map(|(_, rates)| rates).fold(0.0, |high, r| high.max(*r))
    }

    fn panel(self, title: String, span_s: f64, full_gbps: f64) -> Panel {
        let line = |nic: &usize| {
            let points = self.points.iter().map(|(t, rates)| (*t, rates[*nic])).collect();
            Line::new(&format!("NIC a/{nic} → b/{nic}"), COLOURS[nic % COLOURS.len()], points)
        };
        Panel::Lines(Lines {
            title,
            x: Axis::linear("time since the first data", 0.0, span_s, Unit::S),
            y: Axis::linear("throughput", 0.0, full_gbps, Unit::Gbps),
            lines: self.nics.iter().map(line).collect(),
            markers: self.markers,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_a_panel() {
        let run = Run {
            points: vec![(0.0, vec![10.0, 0.0]), (1.0, vec![99.0, 5.0])],
            nics: vec![0, 1],
            markers: vec![Marker { x: 0.5, words: FAULT.into() }],
        };
        assert_eq!((run.span_s(), run.highest()), (1.0, 99.0));
        let Panel::Lines(lines) = run.panel("a".into(), 1.0, 100.0) else { unreachable!() };
        assert_eq!(lines.lines[1].name, "NIC a/1 → b/1");
        assert_eq!(lines.lines[1].points, [(0.0, 0.0), (1.0, 5.0)]);
        assert_eq!(lines.markers[0].words, "nic a/0 dead");
    }
}

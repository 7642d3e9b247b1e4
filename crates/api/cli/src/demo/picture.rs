//! The throughput of each NIC over time as an SVG that reads on light and dark ground.

use std::fmt::Write;

use super::stream::{moved_us, Stream};
use super::FAULT;

const WIDTH: f64 = 860.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 20.0;
const PANEL: f64 = 190.0;
/// Room above each panel for its title.
const TITLE: f64 = 62.0;
const FOOT: f64 = 46.0;
/// A point of the curves stands for so long.
const BIN_US: u64 = 50_000;

const STYLE: &str = "
  text { font: 13px system-ui, sans-serif; fill: #24292f; }
  .title { font-weight: 600; }
  .axis, .grid { stroke: #8c959f; stroke-width: 1; fill: none; }
  .grid { stroke-opacity: .3; }
  .nic0 { stroke: #0969da; fill: #0969da; }
  .nic1 { stroke: #1a7f37; fill: #1a7f37; }
  .nic2 { stroke: #9a6700; fill: #9a6700; }
  .nic3 { stroke: #8250df; fill: #8250df; }
  path.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
  path.area { stroke: none; fill-opacity: .15; }
  text.nic0, text.nic1, text.nic2, text.nic3, text.fault, text.good { stroke: none; }
  .fault { stroke: #cf222e; fill: #cf222e; stroke-width: 1.5; }
  .good { stroke: #0a7ea4; fill: #0a7ea4; stroke-width: 1.5; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .nic0 { stroke: #58a6ff; fill: #58a6ff; }
    .nic1 { stroke: #3fb950; fill: #3fb950; }
    .nic2 { stroke: #d29922; fill: #d29922; }
    .nic3 { stroke: #a371f7; fill: #a371f7; }
    .fault { stroke: #ff7b72; fill: #ff7b72; }
    .good { stroke: #76e3ea; fill: #76e3ea; }
  }
";

/// Both runs, one above the other, over the same time.
pub(crate) fn draw(with: &Stream, without: &Stream) -> String {
    let panels = [Panel::of(with), Panel::of(without)];
    let titles = [
        format!("with failover: {}", outcome(with)),
        format!("without failover: {}", outcome(without)),
    ];
    let span_s = panels.iter().map(Panel::span_s).fold(1.0, f64::max);
    // The curves stay below the texts of the marks.
    let full = panels.iter().map(Panel::highest).fold(1.0, f64::max) * 1.15;
    let height = 2.0 * (TITLE + PANEL) + FOOT;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" role=\"img\">\n\
         <title>Throughput of each NIC over time; {FAULT} in mid-stream</title>\n<style>{STYLE}</style>\n"
    );
    for (n, (panel, title)) in panels.iter().zip(&titles).enumerate() {
        let top = TITLE + n as f64 * (PANEL + TITLE);
        panel.draw(&mut svg, Frame { top, span_s, full }, title);
    }
    let foot = height - 10.0;
    let _ = writeln!(
        svg,
        "<text x=\"{}\" y=\"{foot}\" text-anchor=\"middle\">time since the first data (s)</text>",
        WIDTH / 2.0
    );
    svg + "</svg>\n"
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

/// Something that happened in a run.
struct Mark {
    time_s: f64,
    text: &'static str,
    class: &'static str,
    /// The text stands before its line, and not behind it.
    before: bool,
}

impl Mark {
    /// The fault, where the NIC was healed, and where the stream went back to it. The last two are
    /// a second apart, with their texts on the outside.
    fn all(stream: &Stream) -> Vec<Mark> {
        let mark = |time_us, text, class, before| Mark {
            time_s: stream.seconds(time_us),
            text,
            class,
            before,
        };
        let fault = mark(stream.fault_us, FAULT, "fault", false);
        let healed = stream.healed_us.map(|at_us| mark(at_us, "healed", "good", true));
        let back = stream.way_back().map(|switch| mark(moved_us(switch), "back", "good", false));
        [Some(fault), healed, back].into_iter().flatten().collect()
    }

    fn draw(&self, svg: &mut String, frame: Frame) {
        let (x, class) = (frame.x(self.time_s), self.class);
        let (top, bottom) = (frame.top, frame.y(0.0));
        let (shift, anchor) = if self.before { (-6.0, "end") } else { (6.0, "start") };
        let _ = writeln!(
            svg,
            "<path class=\"{class}\" stroke-dasharray=\"5 4\" d=\"M{x:.1} {top:.1}V{bottom}\"/>"
        );
        let _ = writeln!(
            svg,
            "<text class=\"{class}\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{}</text>",
            x + shift,
            top + 12.0,
            self.text
        );
    }
}

/// A run as curves.
struct Panel {
    /// Times in s since the first data; a rate for each NIC.
    points: Vec<(f64, Vec<f64>)>,
    /// The NICs that it shows.
    nics: Vec<usize>,
    marks: Vec<Mark>,
}

/// Where a panel lies, and the ends of its axes.
#[derive(Clone, Copy)]
struct Frame {
    top: f64,
    span_s: f64,
    full: f64,
}

impl Frame {
    fn x(&self, time_s: f64) -> f64 {
        LEFT + time_s.clamp(0.0, self.span_s) / self.span_s * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, rate: f64) -> f64 {
        self.top + PANEL - rate.clamp(0.0, self.full) / self.full * PANEL
    }

    fn draw_grid(&self, svg: &mut String) {
        for rate in ticks(self.full, 4) {
            let y = self.y(rate);
            let _ = writeln!(svg, "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{}\"/>", WIDTH - RIGHT);
            let _ = writeln!(
                svg,
                "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{rate}</text>",
                LEFT - 8.0,
                y + 4.0
            );
        }
        for time_s in ticks(self.span_s, 10) {
            let (x, y) = (self.x(time_s), self.y(0.0) + 17.0);
            let _ = writeln!(
                svg,
                "<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{time_s}</text>"
            );
        }
        let middle = self.top + PANEL / 2.0;
        let _ = writeln!(
            svg,
            "<text transform=\"translate(18 {middle}) rotate(-90)\" text-anchor=\"middle\">Gbit/s</text>"
        );
    }
}

impl Panel {
    fn of(stream: &Stream) -> Panel {
        let bins = stream.watch.bins(BIN_US);
        let points =
            bins.into_iter().map(|(end_us, rates)| (stream.seconds(end_us - BIN_US / 2), rates));
        let points = points.filter(|(t, _)| *t >= 0.0).collect();
        Panel { points, nics: stream.nics_used().collect(), marks: Mark::all(stream) }
    }

    fn span_s(&self) -> f64 {
        self.points.last().map_or(0.0, |(t, _)| *t)
    }

    fn highest(&self) -> f64 {
        self.points.iter().flat_map(|(_, rates)| rates).fold(0.0, |high, r| high.max(*r))
    }

    fn draw(&self, svg: &mut String, frame: Frame, title: &str) {
        let _ = writeln!(
            svg,
            "<text class=\"title\" x=\"{LEFT}\" y=\"{}\">{}</text>",
            frame.top - 22.0,
            escaped(title)
        );
        frame.draw_grid(svg);
        for (column, nic) in self.nics.iter().copied().enumerate() {
            self.draw_nic(svg, frame, column, nic);
        }
        self.marks.iter().for_each(|mark| mark.draw(svg, frame));
        let (bottom, right) = (frame.y(0.0), WIDTH - RIGHT);
        let _ =
            writeln!(svg, "<path class=\"axis\" d=\"M{LEFT} {}V{bottom}H{right}\"/>", frame.top);
    }

    fn draw_nic(&self, svg: &mut String, frame: Frame, column: usize, nic: usize) {
        let mut line = String::new();
        for (t, rates) in &self.points {
            let step = if line.is_empty() { 'M' } else { 'L' };
            let _ = write!(line, "{step}{:.1} {:.1}", frame.x(*t), frame.y(rates[nic]));
        }
        let Some((begin_s, _)) = self.points.first() else { return };
        let (first, last, bottom) = (frame.x(*begin_s), frame.x(self.span_s()), frame.y(0.0));
        let _ = writeln!(
            svg,
            "<path class=\"area nic{nic}\" d=\"{line}L{last:.1} {bottom}L{first:.1} {bottom}Z\"/>"
        );
        let _ = writeln!(svg, "<path class=\"line nic{nic}\" d=\"{line}\"/>");
        let x = WIDTH - RIGHT - 100.0 * (self.nics.len() - column) as f64 + 8.0;
        let _ = writeln!(
            svg,
            "<text class=\"nic{nic}\" x=\"{x}\" y=\"{}\">NIC a/{nic} → b/{nic}</text>",
            frame.top - 4.0
        );
    }
}

/// Round figures from 0 up to `full`, about `count` of them.
fn ticks(full: f64, count: u32) -> Vec<f64> {
    let rough = full / f64::from(count);
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .iter()
        .map(|m| m * power)
        .find(|step| *step >= rough)
        .unwrap_or(rough);
    // Multiplied, not added up, and rounded, so that 0.3 stays 0.3.
    (0..)
        .map(|n| (f64::from(n) * step * 1e6).round() / 1e6)
        .take_while(|tick| *tick <= full)
        .collect()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round() {
        assert_eq!(ticks(30.0, 4), [0.0, 10.0, 20.0, 30.0]);
        assert_eq!(ticks(9.9, 10), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]);
        assert_eq!(ticks(1.0, 4), [0.0, 0.5, 1.0]);
        assert!(ticks(1.0, 10).contains(&0.3));
    }

    #[test]
    fn a_panel_stays_within_its_frame() {
        let mark = |time_s, text, before| Mark { time_s, text, class: "good", before };
        let marks = vec![mark(0.5, FAULT, false), mark(0.9, "healed", true)];
        let panel = Panel {
            points: vec![(0.0, vec![10.0, 0.0]), (1.0, vec![99.0, 5.0])],
            nics: vec![0, 1],
            marks,
        };
        let mut svg = String::new();
        panel.draw(&mut svg, Frame { top: 40.0, span_s: 1.0, full: 20.0 }, "a <b>");
        assert!(svg.contains("a &lt;b&gt;") && svg.contains("nic a/0 dead"));
        assert!(svg.contains("M64.0 135.0L840.0 40.0"), "{svg}");
        assert!(
            svg.contains("M452.0 40.0V230")
                && svg.contains("x=\"458.0\" y=\"52.0\" text-anchor=\"start\">nic"),
            "{svg}"
        );
        assert!(
            svg.contains("M762.4 40.0V230")
                && svg.contains("x=\"756.4\" y=\"52.0\" text-anchor=\"end\">heal"),
            "{svg}"
        );
    }
}

//! The results: a table for people, the same in Markdown, and a file for programs, which has every
//! round.
//!
//! A median says little without the width of what it stands for, so the ratio (or the value, where
//! it stands alone) has an interval that covers the true median with a probability of 95 % at
//! least: two of the rounds themselves, by the order statistics of the binomial distribution, which
//! assumes nothing of how rounds are distributed.

use std::path::Path;

use serde::Serialize;

use crate::Result;

/// What is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// A larger figure.
    Higher,
    /// A smaller figure.
    Lower,
}

/// One result.
#[derive(Clone, Debug, Serialize)]
pub struct Entry {
    /// What ran.
    pub bench: String,
    /// What was measured of it.
    pub metric: String,
    /// The figure (a median, unless the metric says otherwise).
    pub value: f64,
    /// The unit of `value` and `peer_value`.
    pub unit: String,
    /// What it is compared to, in the same run; none: the value stands alone.
    pub peer: Option<String>,
    /// The peer's figure.
    pub peer_value: Option<f64>,
    /// `value / peer_value`; where both were measured in rounds, the median of the rounds' ratios.
    pub ratio: Option<f64>,
    /// The interval that holds the ratio, or the value where there is no peer, with 95 %; none: too
    /// few rounds.
    pub interval: Option<(f64, f64)>,
    /// The value, round by round; empty where it was not measured in rounds.
    pub rounds: Vec<f64>,
    /// The peer's, in the same rounds.
    pub peer_rounds: Vec<f64>,
    /// The bar: for the ratio where there is a peer, else for the value. None: there is none.
    pub bar: Option<f64>,
    /// Which side of the bar is good.
    pub better: Better,
    /// Whether the bar is reached; none where there is no bar.
    pub ok: Option<bool>,
    /// A command that measures the value again.
    pub command: String,
}

impl Entry {
    /// A value that stands alone.
    pub fn new(
        bench: &str,
        metric: &str,
        value: f64,
        unit: &str,
        better: Better,
        command: &str,
    ) -> Entry {
        Entry {
            bench: bench.into(),
            metric: metric.into(),
            value,
            unit: unit.into(),
            peer: None,
            peer_value: None,
            ratio: None,
            interval: None,
            rounds: Vec::new(),
            peer_rounds: Vec::new(),
            bar: None,
            better,
            ok: None,
            command: command.into(),
        }
    }

    /// Compares it to a peer.
    pub fn beside(mut self, peer: &str, peer_value: f64) -> Entry {
        self.peer = Some(peer.into());
        self.peer_value = Some(peer_value);
        self.ratio = (peer_value > 0.0).then_some(self.value / peer_value);
        self.judge()
    }

    /// Compares it to a peer where both were measured in the same rounds; none where there was
    /// none.
    pub fn beside_rounds(self, peer: &str, values: &[f64], peer_values: &[f64]) -> Option<Entry> {
        let mut entry = self.beside(peer, median(peer_values)?);
        let ratios: Vec<f64> =
            values.iter().zip(peer_values).filter(|(_, p)| **p > 0.0).map(|(v, p)| v / p).collect();
        entry.ratio = median(&ratios);
        entry.interval = interval(&ratios);
        entry.rounds = values.into();
        entry.peer_rounds = peer_values.into();
        Some(entry.judge())
    }

    /// Says what the value is a median of.
    pub fn of_rounds(mut self, values: &[f64]) -> Entry {
        self.interval = interval(values);
        self.rounds = values.into();
        self
    }

    /// Sets a bar.
    pub fn bar(mut self, bar: f64) -> Entry {
        self.bar = Some(bar);
        self.judge()
    }

    fn judge(mut self) -> Entry {
        let figure = if self.peer.is_some() { self.ratio } else { Some(self.value) };
        self.ok = match (self.bar, figure) {
            (Some(bar), Some(figure)) if self.better == Better::Higher => Some(figure >= bar),
            (Some(bar), Some(figure)) => Some(figure <= bar),
            (Some(_), None) => Some(false),
            (None, _) => None,
        };
        self
    }
}

/// The middle of some figures (the mean of the two in the middle); None of none.
pub fn median(figures: &[f64]) -> Option<f64> {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
    }
}

/// Two of some figures between which the median of all that could be measured lies, with a
/// probability of 95 % at least; None: no two of so few do.
pub fn interval(figures: &[f64]) -> Option<(f64, f64)> {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    // The median is below the figure of rank k + 1 if at most k figures are below the median: a
    // binomial distribution with p = 1/2.
    let (mut below, mut term) = (0.0, 0.5_f64.powi(n as i32));
    let mut rank = None;
    for k in 0..n / 2 {
        below += term;
        if below > 0.025 {
            break;
        }
        rank = Some(k);
        term *= (n - k) as f64 / (k + 1) as f64;
    }
    rank.map(|k| (sorted[k], sorted[n - 1 - k]))
}

/// The figure that a share of them does not exceed; None of none.
pub fn percentile(figures: &[f64], share: f64) -> Option<f64> {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied()
}

const HEAD: [&str; 9] =
    ["bench", "metric", "value", "peer", "its value", "ratio", "95 %", "bar", ""];

/// An entry as words under [`HEAD`].
fn row(e: &Entry) -> [String; 9] {
    let sign = if e.better == Better::Higher { "≥" } else { "≤" };
    let unit = if e.peer.is_some() { String::new() } else { format!(" {}", e.unit) };
    [
        e.bench.clone(),
        e.metric.clone(),
        format!("{} {}", figure(e.value), e.unit),
        e.peer.clone().unwrap_or_default(),
        e.peer_value.map(|v| format!("{} {}", figure(v), e.unit)).unwrap_or_default(),
        e.ratio.map(|r| format!("{r:.2}")).unwrap_or_default(),
        e.interval
            .map(|(low, high)| format!("{} to {}", figure(low), figure(high)))
            .unwrap_or_default(),
        e.bar.map(|b| format!("{sign} {b}{unit}")).unwrap_or_default(),
        e.ok.map(|ok| if ok { "ok" } else { "MISSED" }.to_string()).unwrap_or_default(),
    ]
}

/// The table, for a terminal.
pub fn table(entries: &[Entry]) -> String {
    let mut rows = vec![HEAD.map(String::from)];
    rows.extend(entries.iter().map(row));
    let widths: Vec<usize> = (0..HEAD.len())
        .map(|c| rows.iter().map(|r| r[c].chars().count()).max().unwrap_or_default())
        .collect();
    let line = |row: &[String; 9]| {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, w)| format!("{cell:<w$}")).collect();
        cells.join("  ").trim_end().to_string() + "\n"
    };
    rows.iter().map(line).collect()
}

/// The table in Markdown.
pub fn markdown(entries: &[Entry]) -> String {
    let line = |cells: &[String; 9]| format!("| {} |\n", cells.join(" | "));
    let rule = format!("|{}\n", " --- |".repeat(HEAD.len()));
    line(&HEAD.map(String::from))
        + &rule
        + &entries.iter().map(|e| line(&row(e))).collect::<String>()
}

/// Three digits that count, no more.
fn figure(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// Writes the file.
pub fn write(entries: &[Entry], path: &Path) -> Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)
            .map_err(|e| format!("cannot make {}: {e}", folder.display()))?;
    }
    let text = serde_json::to_string_pretty(entries)? + "\n";
    std::fs::write(path, text).map_err(|e| format!("cannot write {}: {e}", path.display()).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_in_rounds_is_compared_round_by_round() {
        let bw = Entry::new("bw", "x", 95.0, "Gbit/s", Better::Higher, "c").bar(0.6);
        // Rounds on a fast machine, on a slow one, and on one that changed in between.
        let e = bw
            .clone()
            .beside_rounds("udp", &[120.0, 120.0, 70.0, 120.0], &[180.0, 180.0, 100.0, 100.0])
            .unwrap();
        assert_eq!((e.peer_value, e.ok), (Some(140.0), Some(true)));
        assert!((e.ratio.unwrap() - (120.0 / 180.0 + 0.7) / 2.0).abs() < 1e-9);
        assert!(bw.beside_rounds("udp", &[70.0], &[]).is_none());
    }

    #[test]
    fn bars_judge_the_ratio_or_the_value() {
        let bw = Entry::new("bw", "x", 30.0, "Gbit/s", Better::Higher, "c");
        assert_eq!(bw.clone().ok, None);
        assert_eq!(bw.clone().beside("udp", 60.0).bar(0.4).ok, Some(true));
        assert_eq!(bw.clone().bar(0.6).beside("udp", 60.0).ok, Some(false));
        assert_eq!(bw.beside("udp", 0.0).bar(0.4).ok, Some(false));
        let lat = Entry::new("lat", "x", 900.0, "us", Better::Lower, "c");
        assert_eq!(lat.clone().bar(1000.0).ok, Some(true));
        assert_eq!(lat.beside("udp", 300.0).bar(2.0).ok, Some(false));
    }

    #[test]
    fn intervals_are_of_ranks() {
        let upto = |n: i32| (1..=n).map(f64::from).collect::<Vec<f64>>();
        assert_eq!(
            interval(&upto(5)),
            None,
            "the least and the largest of five hold the median with 94 %"
        );
        assert_eq!(interval(&upto(6)), Some((1.0, 6.0)));
        assert_eq!(interval(&upto(9)), Some((2.0, 8.0)));
        assert_eq!(interval(&upto(20)), Some((6.0, 15.0)));
        assert_eq!(interval(&[]), None);
    }

    #[test]
    fn the_table_in_markdown_has_all_columns_in_each_row() {
        let entry = Entry::new("bw", "x", 30.0, "Gbit/s", Better::Higher, "c");
        let rounds = [30.0, 31.0, 29.0, 30.0, 30.0, 30.0];
        let entries =
            [entry.clone().beside_rounds("udp", &rounds, &[60.0; 6]).unwrap().bar(0.6), entry];
        let text = markdown(&entries);
        assert!(text.lines().all(|line| line.matches('|').count() == HEAD.len() + 1), "{text}");
        assert!(text.contains("| 0.50 | 0.48 to 0.52 | ≥ 0.6 | MISSED |"), "{text}");
    }

    #[test]
    fn medians_and_percentiles() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        let twenty: Vec<f64> = (1..=20).map(f64::from).collect();
        assert_eq!(percentile(&twenty, 0.99), Some(20.0));
        assert_eq!(percentile(&twenty, 0.5), Some(10.0));
        assert_eq!(percentile(&[], 0.5), None);
    }

    #[test]
    fn the_file_has_the_fields_that_others_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("results/latest.json");
        let entry =
            Entry::new("bw", "x", 30.0, "Gbit/s", Better::Higher, "c").beside("udp", 60.0).bar(0.4);
        assert!(table(std::slice::from_ref(&entry)).contains("0.50"));
        write(&[entry], &path).unwrap();
        let list: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let fields = [
            "bench",
            "metric",
            "value",
            "unit",
            "peer",
            "peer_value",
            "ratio",
            "interval",
            "rounds",
            "peer_rounds",
            "bar",
            "better",
            "ok",
            "command",
        ];
        assert!(fields.iter().all(|f| list[0].get(f).is_some()));
        assert_eq!(list[0]["better"], "higher");
    }
}

//! The page of a report: one file with its pictures in it, and nothing from elsewhere.

use unbroken_chart::{Axis, Bars, Figure, Panel, Series, Unit};
use unbroken_units::show::{bytes, time_s};
use unbroken_units::text::{counted, is_active};

use super::{Incident, Report};
use crate::totals::{Times, BOUNDS_US};
use crate::words::wall_in_words;

/// Rows of tables and bars of pictures; what is beyond is counted.
const MAX_ROWS: usize = 500;
const MAX_BARS: usize = 24;

const STYLE: &str = "
:root{--ground:#fff;--ink:#1f2328;--soft:#57606a;--rule:#8c959f;--good:#116329;--bad:#a40e26;\
--warn:#7d4e00;--raised:#f6f8fa}
@media(prefers-color-scheme:dark){:root{--ground:#0d1117;--ink:#e6edf3;--soft:#9ea7b3;\
--rule:#57606a;--good:#56d364;--bad:#ff7b72;--warn:#e3b341;--raised:#161b22}}
body{margin:2rem auto;max-width:72rem;padding:0 1rem;background:var(--ground);color:var(--ink);\
font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}
table{border-collapse:collapse;width:100%}caption{text-align:left;color:var(--soft)}
th,td{text-align:left;vertical-align:top;padding:.25rem .8rem .25rem 0;border-bottom:1px solid \
var(--rule)}th{color:var(--soft)}.n{text-align:right;font-variant-numeric:tabular-nums}
.good{color:var(--good)}.bad{color:var(--bad)}.warn{color:var(--warn)}.soft{color:var(--soft)}
figure{margin:1rem 0;overflow-x:auto}svg{max-width:100%;height:auto}
.big{font-size:1.2rem;font-weight:600}li{margin:.3rem 0}.wide{overflow-x:auto}
.when text{fill:var(--ink);font:13px system-ui,sans-serif}.lane{stroke:var(--rule)}
.bar{fill:var(--bad)}.dot{fill:var(--warn)}";

/// Text that is text in HTML, whatever it has.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            c if is_active(c) && c != '\n' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

fn us(us: u64) -> String {
    time_s(us as f64 / 1e6)
}

/// The median, as far as buckets tell, and the longest.
fn times(times: &Times) -> String {
    if times.count() == 0 {
        return "not known".into();
    }
    let mut sum = 0;
    let half = BOUNDS_US.iter().zip(times.buckets).find_map(|(bound, count)| {
        sum += count;
        (2 * sum >= times.count()).then_some((*bound).min(times.max_us))
    });
    match half {
        Some(half) if half < times.max_us => {
            format!("half below {}, longest {}", us(half), us(times.max_us))
        }
        _ => us(times.max_us),
    }
}

impl Report {
    /// The page.
    pub fn html(&self) -> String {
        let mut body = String::new();
        self.summary(&mut body);
        self.pictures(&mut body);
        self.incident_table(&mut body);
        self.job_table(&mut body);
        self.reason_table(&mut body);
        self.nic_table(&mut body);
        body += "<h2>What to do</h2><ul>";
        self.advice.iter().for_each(|a| body += &format!("<li>{}</li>", escaped(a)));
        body += "</ul><h2>Sources</h2><ul class=\"soft\">";
        for (name, events) in self.logs.iter().take(MAX_ROWS) {
            let events = counted(*events as u64, "event", "events");
            body += &format!("<li>{}: {events}</li>", escaped(name));
        }
        self.notes.iter().for_each(|n| body += &format!("<li class=bad>{}</li>", escaped(n)));
        format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta \
             http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src \
             'unsafe-inline'\"><meta name=\"viewport\" content=\"width=device-width\"><meta \
             name=\"color-scheme\" content=\"light dark\"><title>What happened</title>\
             <style>{STYLE}</style></head>\n<body><main>{body}</ul></main></body></html>\n"
        )
    }

    fn summary(&self, body: &mut String) {
        let failed: u64 = self.jobs.iter().map(|job| job.failed).sum();
        let switches: u64 = self.jobs.iter().map(|job| job.passive).sum();
        let longest = self.jobs.iter().map(|job| job.outages.max_us).max().unwrap_or(0);
        *body += "<h1>What happened</h1>";
        if self.span_us.1 > 0 {
            let (first, last) = self.span_us;
            *body += &format!(
                "<p class=soft>{} to {} ({})</p>",
                escaped(&wall_in_words(first)),
                escaped(&wall_in_words(last)),
                counted(self.logs.len() as u64, "log", "logs")
            );
        }
        let failures = |n: usize| counted(n as u64, "failure", "failures");
        let (class, words) = match (failed, self.incidents.len()) {
            (0, 0) => ("good", "Nothing failed.".to_owned()),
            // Programs whose queue pairs are not protected leave no word of how they ended.
            (0, n) if switches == 0 => (
                "",
                format!(
                    "{}, and no queue pair switched. Whether a program met them is not logged.",
                    failures(n)
                ),
            ),
            (0, n) => (
                "good",
                format!(
                    "{} {} survived: {} of queue pairs, the longest outage was {}.",
                    failures(n),
                    if n == 1 { "was" } else { "were" },
                    counted(switches, "switch", "switches"),
                    us(longest)
                ),
            ),
            (failed, n) => {
                let failed = counted(failed, "queue pair", "queue pairs");
                ("bad", format!("{}; {failed} failed for good.", failures(n)))
            }
        };
        *body += &format!("<p class=\"big {class}\">{words}</p>");
    }

    fn pictures(&self, body: &mut String) {
        let met: Vec<&Incident> =
            self.incidents.iter().filter(|i| i.switches() > 0).take(MAX_BARS).collect();
        if !self.incidents.is_empty() {
            *body += &timeline(self);
        }
        if met.is_empty() {
            return;
        }
        let ms = |us: u64| us as f64 / 1e6;
        let rows = met.iter().enumerate();
        let rows = rows
            .map(|(n, i)| format!("{}: {}", n + 1, i.what.chars().take(28).collect::<String>()));
        // The longest bar ends before the axis does, so that its figure stands free.
        let high = met.iter().map(|i| ms(i.outages.max_us)).fold(1e-6, f64::max) * 1.05;
        let of = |name, colour, value: fn(&Incident) -> u64| {
            Series::new(name, colour, met.iter().map(|i| ms(value(i))).collect())
        };
        let bars = Bars {
            title: "Longest times of each failure".into(),
            x: Axis::linear("time", 0.0, high, Unit::S),
            rows: rows.collect(),
            series: vec![
                of("until noticed", 1, |i| i.detect.max_us),
                of("until work went on", 2, |i| i.outages.max_us),
            ],
        };
        let figure = Figure { panels: vec![Panel::Bars(bars)], columns: 1, ..Figure::default() };
        // A picture that cannot be drawn: the table has its figures.
        if let Ok(svg) = figure.svg() {
            let svg =
                svg.split_once("<svg").map_or(String::new(), |(_, rest)| format!("<svg{rest}"));
            *body += &format!("<figure>{svg}</figure>");
        }
    }

    fn incident_table(&self, body: &mut String) {
        *body += "<h2>What failed</h2>";
        if self.incidents.is_empty() {
            *body += "<p>Nothing.</p>";
            return;
        }
        *body += "<div class=wide><table><thead><tr><th>#<th>When<th>What<th>NICs<th>How it was \
                  noticed<th>Until noticed<th>Until work went on<th class=n>Switches\
                  <th class=n>Sent again<th>Over after<th>Jobs</thead><tbody>";
        for (n, i) in self.incidents.iter().take(MAX_ROWS).enumerate() {
            let noticed: Vec<String> =
                i.noticed.iter().take(6).map(|(reason, n)| format!("{reason} ({n})")).collect();
            let over = match i.over_us {
                0 => "not yet".to_owned(),
                over => format!("{}; {} went back", us(over.saturating_sub(i.began_us)), i.back),
            };
            let failed: String = i
                .failed
                .iter()
                .take(10)
                .map(|why| format!("<br><span class=bad>failed: {}</span>", escaped(why)))
                .collect();
            let set = if i.is_fault_set { " <span class=soft>(set on purpose)</span>" } else { "" };
            *body += &format!(
                "<tr><td>{}<td>{}<td>{}{set}{failed}<td>{}<td>{}<td>{}<td>{}<td class=n>{}<td \
                 class=n>{}<td>{}<td>{}",
                n + 1,
                escaped(&wall_in_words(i.began_us)),
                escaped(&i.what),
                escaped(&i.nics.join(", ")),
                escaped(&noticed.join(", ")),
                times(&i.detect),
                times(&i.outages),
                i.switches(),
                i.replayed,
                escaped(&over),
                escaped(&i.jobs.join(", ")),
            );
        }
        *body += "</tbody></table></div>";
        more(body, self.incidents.len());
    }

    fn job_table(&self, body: &mut String) {
        *body += "<h2>What it cost each job</h2><div class=wide><table><thead><tr><th>Job<th>\
                  Outcome<th class=n>Processes<th class=n>Forced switches<th class=n>Planned<th>\
                  Outages of a queue pair<th class=n>Together<th class=n>Sent again\
                  <th class=n>Without backup</thead><tbody>";
        for job in self.jobs.iter().take(MAX_ROWS) {
            let outcome = match (job.failed, job.passive) {
                (0, 0) => "<span class=good>met no failure</span>".to_owned(),
                (0, _) => "<span class=good>survived</span>".to_owned(),
                (n, _) => {
                    let failed = counted(n, "queue pair", "queue pairs");
                    format!("<span class=bad>{failed} failed</span>")
                }
            };
            let outages = if job.passive == 0 { "none".into() } else { times(&job.outages) };
            *body += &format!(
                "<tr><td>{}<td>{outcome}<td class=n>{}<td class=n>{}<td class=n>{}<td>{outages}<td \
                 class=n>{}<td class=n>{}<td class=n>{}",
                escaped(&job.job),
                job.processes,
                job.passive,
                job.planned,
                us(job.outages.sum_us),
                job.replayed,
                job.unprotected
            );
        }
        *body += "</tbody></table></div>";
        more(body, self.jobs.len());
    }

    fn reason_table(&self, body: &mut String) {
        if self.reasons.is_empty() {
            return;
        }
        *body += "<h2>Switches by reason</h2><table><thead><tr><th>Kind<th>Reason<th class=n>\
                  Switches</thead><tbody>";
        for ((kind, reason), count) in self.reasons.iter().take(MAX_ROWS) {
            *body += &format!("<tr><td>{kind}<td>{}<td class=n>{count}", escaped(reason));
        }
        *body += "</tbody></table>";
        more(body, self.reasons.len());
    }

    fn nic_table(&self, body: &mut String) {
        if self.nics.is_empty() {
            return;
        }
        *body += "<h2>What NICs carried</h2><table><thead><tr><th>Source<th>NIC<th>State<th \
                  class=n>Sent<th class=n>Received<th class=n>Sent again</thead><tbody>";
        for nic in self.nics.iter().take(MAX_ROWS) {
            *body += &format!(
                "<tr><td>{}<td>{}<td>{}<td class=n>{}<td class=n>{}<td class=n>{}",
                escaped(&nic.log),
                escaped(&nic.nic),
                escaped(&nic.state),
                bytes(nic.tx_bytes as f64),
                bytes(nic.rx_bytes as f64),
                nic.retransmits
            );
        }
        *body += "</tbody></table>";
        more(body, self.nics.len());
    }
}

fn more(body: &mut String, all: usize) {
    if all > MAX_ROWS {
        *body += &format!("<p class=soft>and {} more</p>", all - MAX_ROWS);
    }
}

/// When each failure was, one lane each.
fn timeline(report: &Report) -> String {
    let shown = &report.incidents[..report.incidents.len().min(MAX_BARS)];
    let (first, last) = report.span_us;
    let span = last.saturating_sub(first).max(1) as f64;
    let (left, width, lane) = (40.0, 900.0, 22.0);
    let x =
        |at: u64| left + (width - left - 10.0) * (at.saturating_sub(first) as f64 / span).min(1.0);
    let height = lane * shown.len() as f64 + 26.0;
    let mut svg = format!(
        "<figure><svg class=when viewBox=\"0 0 {width} {height}\" role=\"img\" \
         aria-label=\"When each failure was; the table has the same in words\">"
    );
    for (n, i) in shown.iter().enumerate() {
        let y = n as f64 * lane;
        let end = if i.over_us == 0 { last } else { i.over_us };
        let wide = (x(end) - x(i.began_us)).max(3.0);
        // What is not over goes on behind the end of the log.
        let (open, on) = match i.over_us {
            0 => {
                let (at, tip, middle) = (x(end), x(end) + 9.0, y + lane / 2.0);
                let d =
                    format!("M{at:.1} {}L{tip:.1} {middle}L{at:.1} {}z", y + 2.0, y + lane - 2.0);
                (" (not over when the log ends)", format!("<path class=bar d=\"{d}\" />"))
            }
            _ => ("", String::new()),
        };
        svg += &format!(
            "<line class=lane x1={left} x2={to} y1={m} y2={m} /><text x={t} y={b} \
             text-anchor=end>{n}</text><rect class=bar x={x:.1} y={y:.1} width={wide:.1} \
             height={h}><title>{what}{open}</title></rect>{on}",
            to = width - 10.0,
            m = y + lane / 2.0,
            t = left - 8.0,
            b = y + lane / 2.0 + 4.0,
            n = n + 1,
            x = x(i.began_us),
            y = y + 4.0,
            h = lane - 8.0,
            what = escaped(&i.what),
        );
    }
    for (at, anchor) in [(first, "start"), (first / 2 + last / 2, "middle"), (last, "end")] {
        let words = wall_in_words(at);
        // As many digits as tell the ends from one another.
        let shown = match last.saturating_sub(first) {
            0..=9_999 => 11..26,
            10_000..=9_999_999 => 11..23,
            _ => 0..19,
        };
        let clock = words.get(shown).unwrap_or(&words);
        svg += &format!(
            "<text x={:.1} y={} text-anchor={anchor}>{}</text>",
            x(at),
            height - 6.0,
            escaped(clock)
        );
    }
    svg + "</svg></figure>"
}

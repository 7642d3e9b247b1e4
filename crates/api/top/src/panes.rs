//! The lower part of the screen: queue pairs, rails, events, counts.

use std::collections::BTreeMap;

use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Rect};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Row, Table, Widget};
use unbroken_events::What;
use unbroken_observe::{clock_in_words, event_in_words, SeenQp, Snapshot, Times, BOUNDS_US};
use unbroken_units::show::{bytes, time_s};

use crate::history::History;
use crate::render::{rate, Theme};
use crate::view::Pane;

/// Draws a pane; rows that are scrolled away are left out.
pub(crate) fn draw(
    pane: Pane,
    history: &History,
    scroll: usize,
    theme: &Theme,
    area: Rect,
    buf: &mut Buffer,
) {
    let Some(snapshot) = history.last() else { return };
    match pane {
        Pane::Qps => draw_qps(snapshot, scroll, theme, area, buf),
        Pane::Rails => draw_rails(history, snapshot, scroll, theme, area, buf),
        Pane::Events => draw_events(snapshot, scroll, theme, area, buf),
        Pane::Counts => draw_counts(snapshot, scroll, area, buf),
    }
}

/// Where a list begins, so that its end is not scrolled past.
fn first(all: usize, scroll: usize, room: usize) -> usize {
    scroll.min(all.saturating_sub(room.max(1)))
}

fn draw_qps(snapshot: &Snapshot, scroll: usize, theme: &Theme, area: Rect, buf: &mut Buffer) {
    let qps = &snapshot.qps;
    if qps.is_empty() {
        return Paragraph::new("no queue pairs").render(area, buf);
    }
    let room = usize::from(area.height.saturating_sub(1));
    let programs: BTreeMap<u64, &str> =
        snapshot.processes.iter().map(|p| (p.id, p.program.as_str())).collect();
    let row = |seen: &SeenQp| {
        let qp = &seen.qp.qp;
        let (words, style) = match (qp.protected, qp.pending, seen.first_path.as_str()) {
            _ if qp.state == "failed" => (format!("failed: {}", qp.why), theme.bad()),
            (false, false, _) => (format!("no: {}", qp.why), theme.bad()),
            (false, true, _) => (format!("pending: {}", qp.why), theme.warning()),
            (true, _, "") => ("yes".to_owned(), theme.good()),
            (true, _, first) => (format!("yes, first path {first}"), theme.warning()),
        };
        let path = if qp.path.is_empty() { &qp.primary } else { &qp.path };
        Row::new([
            Span::raw(format!("{:#x}", qp.qp)),
            Span::raw(programs.get(&seen.qp.process).copied().unwrap_or("?").to_owned()),
            Span::raw(qp.state.clone()),
            Span::raw(path.clone()),
            Span::styled(words, style),
        ])
    };
    let widths = [
        Constraint::Length(8),
        Constraint::Length(12),
        Constraint::Length(9),
        Constraint::Length(12),
        Constraint::Fill(1),
    ];
    let heads = ["qp", "program", "state", "path", "protected"];
    let listed = qps.iter().skip(first(qps.len(), scroll, room)).take(room).map(row);
    let table = Table::new(listed, widths).header(Row::new(heads).style(theme.head()));
    Widget::render(table, area, buf);
}

fn draw_rails(
    history: &History,
    snapshot: &Snapshot,
    scroll: usize,
    theme: &Theme,
    area: Rect,
    buf: &mut Buffer,
) {
    /// NICs, those that are active, what they carry.
    #[derive(Default)]
    struct Rail(usize, usize, f64, f64);
    let mut rails: BTreeMap<u32, Rail> = BTreeMap::new();
    for nic in &snapshot.nics {
        let Some(index) = nic.nic.split('/').nth(1).and_then(|index| index.parse().ok()) else {
            continue;
        };
        let rates = history.rates(&nic.nic);
        let rail = rails.entry(index).or_default();
        rail.0 += 1;
        rail.1 += usize::from(nic.state == "active" && nic.faults.is_empty());
        rail.2 += rates.tx_bps;
        rail.3 += rates.rx_bps;
    }
    if rails.is_empty() {
        return Paragraph::new("rails are those of an emulated network").render(area, buf);
    }
    let room = usize::from(area.height.saturating_sub(1));
    let from = first(rails.len(), scroll, room);
    let row = |(index, Rail(all, well, tx, rx)): (&u32, &Rail)| {
        let style = if all == well { theme.good() } else { theme.warning() };
        Row::new([
            Span::raw(format!("rail{index}")),
            Span::styled(format!("{well} of {all}"), style),
            Span::raw(rate(*tx)),
            Span::raw(rate(*rx)),
        ])
    };
    let widths = [8, 12, 14, 14].map(Constraint::Length);
    let heads = ["rail", "NICs well", "sent", "received"];
    let table = Table::new(rails.iter().skip(from).take(room).map(row), widths)
        .header(Row::new(heads).style(theme.head()));
    Widget::render(table, area, buf);
}

fn draw_events(snapshot: &Snapshot, scroll: usize, theme: &Theme, area: Rect, buf: &mut Buffer) {
    let events: Vec<_> = snapshot.recent().collect();
    if events.is_empty() {
        return Paragraph::new("nothing has happened yet").render(area, buf);
    }
    let room = usize::from(area.height);
    let line = |event: &&unbroken_events::Event| {
        let style = match &event.what {
            What::GiveUp { .. } | What::DeviceFatal { .. } | What::PortDown { .. } => theme.bad(),
            What::Fault { .. } | What::Switch(_) => theme.warning(),
            _ => theme.good(),
        };
        let time = Span::styled(clock_in_words(event.wall_us), theme.quiet());
        Line::from(vec![time, Span::raw("  "), Span::styled(event_in_words(event), style)])
    };
    // The newest first: it is what is looked for.
    let from = first(events.len(), scroll, room);
    let lines: Vec<Line> = events.iter().rev().skip(from).take(room).map(line).collect();
    Paragraph::new(lines).render(area, buf);
}

/// The time that a share of outages does not exceed, as far as the buckets tell.
fn quantile_us(times: &Times, share: f64) -> u64 {
    let wanted = (times.count() as f64 * share).ceil() as u64;
    let mut sum = 0;
    for (bound, count) in BOUNDS_US.iter().zip(times.buckets) {
        sum += count;
        if sum >= wanted {
            return (*bound).min(times.max_us);
        }
    }
    times.max_us
}

fn draw_counts(snapshot: &Snapshot, scroll: usize, area: Rect, buf: &mut Buffer) {
    let totals = &snapshot.totals;
    let mut lines = Vec::new();
    for (host, times) in &totals.outages {
        let us = |us: u64| time_s(us as f64 / 1e6);
        lines.push(format!(
            "outages of {host}: {}, half below {}, longest {}",
            times.count(),
            us(quantile_us(times, 0.5)),
            us(times.max_us)
        ));
    }
    for (key, count) in &totals.switches {
        lines.push(format!("{count:>6} {} switches of {}: {}", key.kind, key.host, key.reason));
    }
    for ((host, why), count) in &*snapshot.unprotected {
        lines.push(format!("{count:>6} QPs of {host} not protected: {why}"));
    }
    for c in &*snapshot.communicators {
        let sent: u64 = c.sent_bytes.iter().sum();
        let down = if c.down.is_empty() { "none".to_owned() } else { c.down.join(", ") };
        lines.push(format!(
            "rank {} of {}: {} operations, {} sent, NICs down: {down}",
            c.rank,
            c.ranks,
            c.counters.operations,
            bytes(sent as f64)
        ));
        lines.extend(c.broken.as_ref().map(|why| format!("rank {} is broken: {why}", c.rank)));
    }
    if let Some(edge) = &*snapshot.edge {
        for uplink in &edge.uplinks {
            lines.push(format!(
                "uplink {}: carrier {}, BFD {}, BGP {}",
                uplink.device, uplink.carrier, uplink.bfd, uplink.bgp
            ));
        }
    }
    if lines.is_empty() {
        lines.push("no switches yet".into());
    }
    let room = usize::from(area.height);
    let from = first(lines.len(), scroll, room);
    let lines: Vec<Line> = lines.into_iter().skip(from).take(room).map(Line::from).collect();
    Paragraph::new(lines).render(area, buf);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_bounds_of_buckets() {
        let mut times = Times::default();
        [90, 90, 400, 3_000].into_iter().for_each(|us| times.add(us));
        assert_eq!([0.5, 0.75, 1.0].map(|share| quantile_us(&times, share)), [100, 500, 3_000]);
        assert_eq!(quantile_us(&Times::default(), 0.5), 0);
    }

    #[test]
    fn a_list_is_not_scrolled_past_its_end() {
        assert_eq!([first(30, 0, 10), first(30, 5, 10), first(30, 99, 10)], [0, 5, 20]);
        assert_eq!([first(3, 9, 10), first(0, 9, 0)], [0, 0]);
    }
}

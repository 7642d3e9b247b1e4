//! The screen: a pure function of what was seen of late and of what a person has chosen.

use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Margin, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Cell, Clear, Paragraph, Row, Table, Widget};
use unbroken_events::NicStatus;
use unbroken_observe::{clock_in_words, health, Health, Snapshot, Verdict};
use unbroken_units::show::rate_bps;

use crate::history::History;
use crate::panes;
use crate::view::{shown, View, PANES};

/// Below this there is no room for what matters.
const MIN_WIDTH: u16 = 40;
const MIN_HEIGHT: u16 = 10;
/// From this height on all panes are shown.
const TALL: u16 = 42;
const BARS: [&str; 9] = [" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"];

/// The colours of the screen; without them words and letters say the same.
pub(crate) struct Theme(bool);

impl Theme {
    pub(crate) fn of(view: &View) -> Theme {
        Theme(view.is_plain)
    }

    fn coloured(&self, colour: Color) -> Style {
        if self.0 {
            Style::new()
        } else {
            Style::new().fg(colour)
        }
    }

    pub(crate) fn good(&self) -> Style {
        self.coloured(Color::Green)
    }

    pub(crate) fn bad(&self) -> Style {
        self.coloured(Color::Red).add_modifier(Modifier::BOLD)
    }

    pub(crate) fn warning(&self) -> Style {
        self.coloured(Color::Yellow)
    }

    pub(crate) fn quiet(&self) -> Style {
        Style::new().add_modifier(Modifier::DIM)
    }

    pub(crate) fn head(&self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }
}

/// Draws the screen into a buffer.
pub fn render(history: &History, view: &View, area: Rect, buf: &mut Buffer) {
    let theme = Theme::of(view);
    if area.width < MIN_WIDTH || area.height < MIN_HEIGHT {
        Paragraph::new(format!("{MIN_WIDTH}x{MIN_HEIGHT} at least")).render(area, buf);
        return;
    }
    let Some(snapshot) = history.last() else {
        Paragraph::new("looking …").render(area, buf);
        return;
    };
    let nics = shown(snapshot);
    let is_tall = area.height >= TALL;
    let of_nics =
        (nics.len() as u16 + 3).min(if is_tall { area.height / 3 } else { area.height * 2 / 5 });
    let [head, list, rest, foot] = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(of_nics.max(4)),
        Constraint::Min(3),
        Constraint::Length(1),
    ])
    .areas(area);
    draw_head(&health(snapshot, None), snapshot, &theme, head, buf);
    draw_nics(history, &nics, view, list, buf);
    if is_tall {
        let [qps, events, below] =
            Layout::vertical([Constraint::Fill(2), Constraint::Fill(2), Constraint::Fill(1)])
                .areas(rest);
        let [rails, counts] = Layout::horizontal([Constraint::Fill(1); 2]).areas(below);
        for ((pane, title), area) in PANES.iter().zip([qps, rails, events, counts]) {
            let scroll = if *pane == view.pane { view.scroll } else { 0 };
            let inner = framed(title, area, buf);
            panes::draw(*pane, history, scroll, &theme, inner, buf);
        }
    } else {
        let inner = framed("", rest, buf);
        let row = Rect { height: 1, ..rest }.inner(Margin { horizontal: 1, vertical: 0 });
        draw_tabs(view, &theme, row, buf);
        panes::draw(view.pane, history, view.scroll, &theme, inner, buf);
    }
    draw_foot(snapshot, view, &theme, foot, buf);
    if let Some(action) = &view.asked {
        let lines = [format!("{action} ?"), String::new(), "y: yes   n: no".into()];
        draw_box(" Change this? ", &lines, area, buf);
    } else if view.is_help_open {
        draw_box(" Keys ", &HELP.map(String::from), area, buf);
    }
}

const HELP: [&str; 11] = [
    "up, down   choose a NIC",
    "x          the NIC dies (emulated network)",
    "p          its port goes down",
    "c          its cable is cut",
    "u          clear its first fault",
    "d          drain it, or use it again",
    "1-4, Tab   choose what is shown below",
    "PgUp PgDn  scroll that",
    "q          quit",
    "",
    "All changes are asked back.",
];

/// A frame with a title; gives the area within.
fn framed(title: &str, area: Rect, buf: &mut Buffer) -> Rect {
    let block = Block::bordered().title(title);
    let inner = block.inner(area);
    block.render(area, buf);
    inner
}

fn draw_head(health: &Health, snapshot: &Snapshot, theme: &Theme, area: Rect, buf: &mut Buffer) {
    let style = match health.verdict {
        Verdict::Healthy => theme.good(),
        Verdict::Degraded | Verdict::Unknown => theme.warning(),
        Verdict::Failed => theme.bad(),
    };
    let mut words = vec![
        Span::styled("unbroken top  ", theme.head()),
        Span::raw(clock_in_words(snapshot.wall_us)),
        Span::raw("  "),
        Span::styled(health.verdict.words(), style.add_modifier(Modifier::BOLD)),
    ];
    if health.capacity < 1.0 {
        words.push(Span::raw(format!("  {:.0} % capacity left", health.capacity * 100.0)));
    }
    if health.since_unix_s > 0.0 {
        let since = clock_in_words((health.since_unix_s * 1e6) as u64);
        words.push(Span::raw(format!("  since {since}")));
    }
    let counts = snapshot.all_counts();
    let hosts = snapshot.hosts().len();
    let of = |n: u64, what: &str| if n > 0 { format!(", {n} {what}") } else { String::new() };
    // A directory that does not answer is why nothing new is protected: it stands before the rest.
    let lost = snapshot.totals.directory_lost.values().next();
    let first = match lost {
        Some(lost) => format!("directory lost: {}", lost.what),
        None => format!("{hosts} hosts, {} processes", snapshot.processes.len()),
    };
    let second = format!(
        "{first}, {} QPs: {} protected{}{}{}{}",
        counts.all,
        counts.protected,
        of(counts.pending, "pending"),
        of(counts.unprotected, "not protected"),
        of(counts.displaced, "displaced"),
        of(counts.failed, "failed"),
    );
    let problem = snapshot.problems.first();
    let second = match problem {
        Some(problem) => Line::styled(format!("not known: {problem}"), theme.bad()),
        None if lost.is_some() => Line::styled(second, theme.warning()),
        None => Line::raw(second),
    };
    Paragraph::new(vec![Line::from(words), second]).render(area, buf);
}

fn draw_nics(history: &History, nics: &[&NicStatus], view: &View, area: Rect, buf: &mut Buffer) {
    let theme = Theme::of(view);
    let rows = usize::from(area.height.saturating_sub(3)).max(1);
    // The chosen one stays in sight.
    let first = view.selected.saturating_sub(rows - 1).min(nics.len().saturating_sub(rows));
    let of_late = usize::from(area.width.saturating_sub(78)).clamp(8, 60);
    let peak = history.peak_bps();
    let row = |(n, nic): (usize, &&NicStatus)| {
        let rates = history.rates(&nic.nic);
        let bars = bars(history.of_late(&nic.nic), of_late, peak);
        let state = match nic.state.as_str() {
            "active" => Span::styled(nic.state.clone(), theme.good()),
            "dead" | "down" => Span::styled(nic.state.to_uppercase(), theme.bad()),
            _ => Span::styled(nic.state.clone(), theme.warning()),
        };
        let mark = if n == view.selected { ">" } else { " " };
        let row = Row::new([
            Cell::from(format!("{mark}{}", nic.nic)),
            Cell::from(state),
            Cell::from(Line::from(rate(rates.tx_bps)).right_aligned()),
            Cell::from(Line::from(rate(rates.rx_bps)).right_aligned()),
            Cell::from(bars),
            Cell::from(Span::styled(nic.faults.join(", "), theme.bad())),
        ]);
        if n == view.selected {
            row.style(Style::new().add_modifier(Modifier::REVERSED))
        } else {
            row
        }
    };
    let listed = nics.iter().enumerate().skip(first).take(rows).map(row);
    let more = nics.len().saturating_sub(first + rows);
    let title = if more > 0 { format!("NICs, {more} more below") } else { "NICs".into() };
    let widths = [
        Constraint::Length(11),
        Constraint::Length(15),
        Constraint::Length(11),
        Constraint::Length(11),
        Constraint::Length(of_late as u16),
        Constraint::Fill(1),
    ];
    let heads = [" nic", "state", "       sent", "   received", "of late", "faults"];
    let table = Table::new(listed, widths)
        .header(Row::new(heads).style(theme.head()))
        .block(Block::bordered().title(title));
    Widget::render(table, area, buf);
}

/// A rate with few letters.
pub(crate) fn rate(bps: f64) -> String {
    if bps < 1.0 {
        return "0".into();
    }
    let digits = 10_f64.powf(bps.log10().floor() - 2.0);
    rate_bps((bps / digits).round() * digits)
}

/// The newest values as bars of eight heights.
fn bars(values: impl DoubleEndedIterator<Item = f64>, room: usize, peak: f64) -> String {
    let height = |value: f64| match value > 0.0 && peak > 0.0 {
        true => ((value / peak * 8.0).ceil() as usize).clamp(1, 8),
        false => 0,
    };
    let mut newest: Vec<&str> = values.rev().take(room).map(|v| BARS[height(v)]).collect();
    newest.reverse();
    newest.concat()
}

fn draw_tabs(view: &View, theme: &Theme, area: Rect, buf: &mut Buffer) {
    let mut spans = Vec::new();
    for (pane, title) in PANES {
        let style = match pane == view.pane {
            true => theme.head().add_modifier(Modifier::REVERSED),
            false => theme.quiet(),
        };
        spans.extend([Span::styled(format!(" {title} "), style), Span::raw(" ")]);
    }
    Paragraph::new(Line::from(spans)).render(area, buf);
}

fn draw_foot(snapshot: &Snapshot, view: &View, theme: &Theme, area: Rect, buf: &mut Buffer) {
    let keys = match snapshot.emulated {
        true => "q quit  ? keys  x kill  p port down  c cut  u mend  d drain  Tab next pane",
        false => "q quit  ? keys  d drain  Tab next pane",
    };
    let line = match view.message.as_str() {
        "" => Line::styled(keys, theme.quiet()),
        message => Line::styled(message.to_owned(), theme.head()),
    };
    Paragraph::new(line).render(area, buf);
}

/// A box in the middle of the screen.
fn draw_box(title: &str, lines: &[String], area: Rect, buf: &mut Buffer) {
    let widest = lines.iter().map(|line| line.chars().count()).max().unwrap_or(0) as u16;
    let width = (widest + 4).max(title.len() as u16 + 2).min(area.width);
    let height = (lines.len() as u16 + 2).min(area.height);
    let place = Rect {
        x: area.x + (area.width - width) / 2,
        y: area.y + (area.height - height) / 2,
        width,
        height,
    };
    Clear.render(place, buf);
    let inner = framed(title, place, buf).inner(Margin { horizontal: 1, vertical: 0 });
    let lines: Vec<Line> = lines.iter().map(|line| Line::raw(line.as_str())).collect();
    Paragraph::new(lines).render(inner, buf);
}

#[cfg(test)]
mod tests;

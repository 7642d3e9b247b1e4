//! What the screen shows, at the sizes that people have.

use std::sync::Arc;

use ratatui::backend::TestBackend;
use ratatui::Terminal;
use unbroken_observe::Action;

use super::*;
use crate::samples;
use crate::view::Pane;

fn drawn(history: &History, view: &View, (width, height): (u16, u16)) -> (String, Buffer) {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| render(history, view, frame.area(), frame.buffer_mut())).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let row = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    let text = (0..height).map(|y| row(y).trim_end().to_owned() + "\n").collect();
    (text, buffer)
}

fn history(dead: bool) -> History {
    let mut history = History::default();
    history.push(Arc::new(samples::with(1_000_000, 0, dead)));
    history.push(Arc::new(samples::with(2_000_000, 5_000_000, dead)));
    history
}

#[test]
fn at_80_by_24_nics_rates_and_queue_pairs_are_there() {
    let (text, _) = drawn(&history(false), &View::default(), (80, 24));
    for words in [
        "unbroken top",
        "healthy",
        "2 hosts, 2 processes, 2 QPs: 1 protected, 1 not protected",
        ">a/0",
        "active",
        "40 Mbit/s",
        "a/0-b/0",
        "no: it has memory windows",
        "ib_write_bw",
        "1 queue pairs",
        "q quit",
    ] {
        assert!(text.contains(words), "{words} is not in\n{text}");
    }
    assert_eq!(text.lines().count(), 24);
}

#[test]
fn a_dead_nic_is_seen_without_colours() {
    let view = View { pane: Pane::Events, is_plain: true, ..View::default() };
    let (text, buffer) = drawn(&history(true), &view, (80, 24));
    for words in ["degraded, survived", "50 % capacity left", "DEAD", "nic a/0 dead", "switched"] {
        assert!(text.contains(words), "{words} is not in\n{text}");
    }
    assert!(buffer.content().iter().all(|cell| cell.fg == Color::Reset && cell.bg == Color::Reset));
    let (_, coloured) = drawn(&history(true), &View::default(), (80, 24));
    assert!(coloured.content().iter().any(|cell| cell.fg == Color::Red));
}

#[test]
fn every_pane_draws_at_every_size() {
    for dead in [false, true] {
        for (width, height) in [(1, 1), (39, 9), (40, 10), (80, 24), (120, 50), (300, 100)] {
            for (pane, _) in PANES {
                let asked = dead.then(|| Action::Drain { nic: "a/0".repeat(100) });
                let view = View { pane, asked, is_help_open: true, scroll: 999, ..View::default() };
                drawn(&history(dead), &view, (width, height));
            }
        }
    }
    drawn(&History::default(), &View::default(), (80, 24));
}

#[test]
fn a_tall_screen_has_all_panes() {
    let (text, _) = drawn(&history(true), &View::default(), (132, 50));
    for words in
        ["1 queue pairs", "2 rails", "3 events", "4 counts", "rail0", "1 of 2", "the NIC died"]
    {
        assert!(text.contains(words), "{words} is not in\n{text}");
    }
    assert!(text.contains("outages of a: 1, half below 720 us"), "{text}");
}

#[test]
fn what_is_asked_and_the_keys_are_in_a_box() {
    let asked = Some(Action::SetFault { fault: "nic a/0 dead".into() });
    let (text, _) = drawn(&history(false), &View { asked, ..View::default() }, (80, 24));
    assert!(text.contains("unbroken fault set 'nic a/0 dead' ?"), "{text}");
    let view = View { is_help_open: true, ..View::default() };
    let (text, _) = drawn(&history(false), &view, (80, 24));
    assert!(text.contains("its cable is cut") && text.contains("asked back"), "{text}");
}

#[test]
fn the_chosen_nic_stays_in_sight() {
    let mut snapshot = samples::snapshot(1, 0);
    let nic = snapshot.nics[0].clone();
    snapshot.nics = (0..100).map(|n| NicStatus { nic: format!("h/{n}"), ..nic.clone() }).collect();
    let mut history = History::default();
    history.push(Arc::new(snapshot));
    for selected in [0, 50, 99] {
        let (text, _) = drawn(&history, &View { selected, ..View::default() }, (80, 24));
        assert!(text.contains(&format!(">h/{selected} ")), "{selected}:\n{text}");
    }
}

#[test]
fn bars_are_as_high_as_their_values() {
    assert_eq!(bars([0.0, 1.0, 4.0, 8.0].into_iter(), 3, 8.0), "▁▄█");
    assert_eq!(bars([0.0, 0.0].into_iter(), 8, 0.0), "  ");
}

//! What a person has chosen on the screen, and what a key makes of it. Pure: no key is read here.

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use unbroken_events::NicStatus;
use unbroken_observe::{Action, Snapshot};

/// The lower part of the screen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pane {
    /// Queue pairs.
    #[default]
    Qps,
    /// Rails: NICs of equal number.
    Rails,
    /// What happened.
    Events,
    /// Switches by reason, outages, collectives.
    Counts,
}

/// All panes, in the order of their keys.
pub const PANES: [(Pane, &str); 4] = [
    (Pane::Qps, "1 queue pairs"),
    (Pane::Rails, "2 rails"),
    (Pane::Events, "3 events"),
    (Pane::Counts, "4 counts"),
];

/// What a person has chosen.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// The NIC that keys are about, by its place in the list.
    pub selected: usize,
    /// The lower part.
    pub pane: Pane,
    /// Rows of the pane that are scrolled away.
    pub scroll: usize,
    /// What is to be confirmed.
    pub asked: Option<Action>,
    /// Whether the keys are shown.
    pub is_help_open: bool,
    /// What came of the last key; it goes with the next.
    pub message: String,
    /// Whether colours are to be left out.
    pub is_plain: bool,
}

/// What is to be done after a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing but to draw anew.
    Draw,
    /// To carry out a change that was confirmed.
    Act(Action),
    /// To end.
    Quit,
}

/// The NICs that the screen lists: those that someone has open, that have carried something, or
/// with which something is wrong; all, where these are none.
pub fn shown(snapshot: &Snapshot) -> Vec<&NicStatus> {
    let is_shown = |nic: &&NicStatus| {
        nic.state != "active"
            || !nic.pids.is_empty()
            || !nic.faults.is_empty()
            || nic.counters.tx_bytes + nic.counters.rx_bytes > 0
    };
    let some: Vec<&NicStatus> = snapshot.nics.iter().filter(is_shown).collect();
    if some.is_empty() {
        snapshot.nics.iter().collect()
    } else {
        some
    }
}

impl View {
    /// Takes a key.
    pub fn key(&mut self, key: KeyEvent, snapshot: &Snapshot) -> Next {
        self.message.clear();
        if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
            return Next::Quit;
        }
        if let Some(action) = self.asked.take() {
            return match key.code {
                KeyCode::Char('y' | 'Y') => Next::Act(action),
                KeyCode::Char('n' | 'N') | KeyCode::Esc => {
                    self.message = "nothing was changed".into();
                    Next::Draw
                }
                _ => {
                    self.asked = Some(action);
                    Next::Draw
                }
            };
        }
        if std::mem::take(&mut self.is_help_open) {
            return Next::Draw;
        }
        let nics = shown(snapshot);
        self.selected = self.selected.min(nics.len().saturating_sub(1));
        match key.code {
            KeyCode::Char('q') => return Next::Quit,
            KeyCode::Char('?' | 'h') => self.is_help_open = true,
            KeyCode::Up | KeyCode::Char('k') => self.selected = self.selected.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => {
                self.selected = (self.selected + 1).min(nics.len().saturating_sub(1));
            }
            KeyCode::PageDown => self.scroll = self.scroll.saturating_add(10),
            KeyCode::PageUp => self.scroll = self.scroll.saturating_sub(10),
            KeyCode::Home => self.scroll = 0,
            KeyCode::Tab => self.turn(1),
            KeyCode::BackTab => self.turn(PANES.len() - 1),
            KeyCode::Char(c @ '1'..='4') => {
                self.open(PANES[c as usize - '1' as usize].0);
            }
            KeyCode::Char(c) => match nics.get(self.selected) {
                Some(nic) => self.ask(c, nic, snapshot),
                None => self.message = "there is no NIC yet".into(),
            },
            _ => {}
        }
        Next::Draw
    }

    fn turn(&mut self, by: usize) {
        let at = PANES.iter().position(|(pane, _)| *pane == self.pane).unwrap_or_default();
        self.open(PANES[(at + by) % PANES.len()].0);
    }

    fn open(&mut self, pane: Pane) {
        (self.pane, self.scroll) = (pane, 0);
    }

    /// Asks whether to change something of a NIC.
    fn ask(&mut self, key: char, nic: &NicStatus, snapshot: &Snapshot) {
        let name = nic.nic.clone();
        let is_drained = nic.state.ends_with("drained");
        let action = match key {
            'x' => Action::SetFault { fault: format!("nic {name} dead") },
            'p' => Action::SetFault { fault: format!("nic {name} down") },
            'c' => Action::SetFault { fault: format!("cable {name} cut") },
            // Those of the NIC and of its cable.
            'u' => match nic.faults.first() {
                Some(fault) => Action::ClearFault { fault: fault.clone() },
                None => {
                    self.message = format!("{name} has no fault");
                    return;
                }
            },
            'd' if is_drained => Action::Undrain { nic: name },
            'd' => Action::Drain { nic: name },
            _ => return,
        };
        let is_fault = matches!(action, Action::SetFault { .. } | Action::ClearFault { .. });
        if is_fault && !snapshot.emulated {
            self.message = "faults are set in an emulated network; this is none".into();
            return;
        }
        self.asked = Some(action);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    fn keys(view: &mut View, snapshot: &Snapshot, keys: &str) -> Next {
        let mut next = Next::Draw;
        for key in keys.chars() {
            next = view.key(KeyEvent::from(KeyCode::Char(key)), snapshot);
        }
        next
    }

    #[test]
    fn what_changes_something_is_confirmed_first() {
        let snapshot = samples::snapshot(1, 0);
        let mut view = View::default();
        assert_eq!(keys(&mut view, &snapshot, "x"), Next::Draw);
        assert_eq!(keys(&mut view, &snapshot, "n"), Next::Draw);
        assert_eq!((view.asked.is_none(), view.message.as_str()), (true, "nothing was changed"));
        let dead = Action::SetFault { fault: "nic a/1 dead".into() };
        // What is no answer leaves the question open.
        assert_eq!(keys(&mut view, &snapshot, "jxqjy"), Next::Act(dead));
        let drain = Action::Drain { nic: "a/1".into() };
        assert_eq!(keys(&mut view, &snapshot, "dy"), Next::Act(drain));
        assert_eq!(keys(&mut view, &snapshot, "q"), Next::Quit);
    }

    #[test]
    fn a_fault_is_cleared_by_its_own_words() {
        let snapshot = samples::with(1, 0, true);
        let mut view = View::default();
        let clear = Action::ClearFault { fault: "nic a/0 dead".into() };
        assert_eq!(keys(&mut view, &snapshot, "uy"), Next::Act(clear));
        assert_eq!(keys(&mut view, &snapshot, "ju"), Next::Draw);
        assert_eq!(view.message, "a/1 has no fault");
    }

    #[test]
    fn a_real_network_has_no_faults_to_set() {
        let mut snapshot = samples::snapshot(1, 0);
        snapshot.emulated = false;
        let mut view = View::default();
        keys(&mut view, &snapshot, "x");
        assert!(view.asked.is_none() && view.message.contains("emulated"));
        assert!(matches!(keys(&mut view, &snapshot, "dy"), Next::Act(Action::Drain { .. })));
    }

    #[test]
    fn the_selection_stays_within_the_list() {
        let snapshot = samples::snapshot(1, 0);
        let mut view = View::default();
        keys(&mut view, &snapshot, &"j".repeat(50));
        assert_eq!(view.selected, 3);
        keys(&mut view, &Snapshot::default(), "jx");
        assert_eq!((view.selected, view.message.as_str()), (0, "there is no NIC yet"));
        keys(&mut view, &snapshot, "3");
        assert_eq!(view.pane, Pane::Events);
        view.key(KeyEvent::from(KeyCode::Tab), &snapshot);
        view.key(KeyEvent::from(KeyCode::Tab), &snapshot);
        assert_eq!(view.pane, Pane::Qps);
    }
}

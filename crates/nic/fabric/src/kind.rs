//! The kinds of faults, declared once.
//!
//! A new kind is a row here. The compiler then asks for the rest: what it is in words (`fault`,
//! `grammar`), as numbers (`entry`), what it does to a NIC (`view`) or to packets (`conditions`,
//! and softnic's `engine/impair.rs`), and where it is (`fabric`). The help of the command shows the
//! row by itself; the tests ask for a line in docs/reference/faults.md, and that random schedules
//! (`random`) and `tests/e2e/test_churn.py` know it. Its end-to-end test goes to
//! `tests/e2e/test_survival.py`. A fault changes nothing that senders account for: a packet that
//! is cut short, for one, would give back less credit than was taken for it.

/// A form of a fault, for help and errors.
#[derive(Clone, Copy, Debug)]
pub struct FaultForm {
    /// The word that it begins with.
    pub word: &'static str,
    /// An example, which is a fault.
    pub example: &'static str,
    /// What it does.
    pub does: &'static str,
    pub(crate) kind: Kind,
}

macro_rules! kinds {
    ($($kind:ident = $number:literal: $($word:literal, $example:literal, $does:literal;)+)+) => {
        /// The kind of a fault, as a number in the page, which is never given to another.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub(crate) enum Kind {
            $($kind = $number,)+
        }

        impl Kind {
            /// All of them.
            pub(crate) const ALL: &[Kind] = &[$(Kind::$kind,)+];

            /// The word that its forms begin with; of several the first.
            pub(crate) const fn word(self) -> &'static str {
                match self {
                    $(Kind::$kind => [$($word,)+][0],)+
                }
            }
        }

        /// The forms of all faults.
        pub const FAULT_FORMS: &[FaultForm] = &[
            $($(FaultForm { kind: Kind::$kind, word: $word, example: $example, does: $does },)+)+
        ];
    };
}

kinds! {
    NicDead = 1:
        "nic", "nic a/0 dead", "the NIC does nothing more; its programs see a device-fatal event";
    Down = 2:
        "nic", "nic a/0 down", "its port is down; its programs see a port-down event";
        "nic", "nic a/0/2 down", "the same for port 2 alone; so can 'cable a/0/2 cut' and 'flap \
                                  a/0/2 …'";
        "cable", "cable a/0 cut", "nothing comes through the cable of the NIC";
        "switch", "switch rail0 down", "nothing comes through the switch that joins the NICs 0 of \
                                        all hosts";
        "switch", "switch rail0b down", "the same of the switch that joins their second ports";
        "spine", "spine down", "nothing comes from NICs of one rail to those of another";
    Flap = 11:
        "flap", "flap a/0 down=200ms up=1s", "the port is down and up in turns; also of 'cable \
                                              a/0' and 'rail0'";
    WqeError = 12:
        "wqe-error", "wqe-error a/0", "the next send posted to the NIC is made invalid: its queue \
                                       pair fails";
    Loss = 3:
        "loss", "loss a/0 1%", "packets are lost at random";
    BurstLoss = 4:
        "burst-loss", "burst-loss a/0 1% burst=8", "packets are lost in bursts of 8 in the mean";
    Corrupt = 5:
        "corrupt", "corrupt a/0 1%", "a bit is flipped, so that the receiver drops the packet";
    Duplicate = 6:
        "duplicate", "duplicate a/0 1%", "packets come twice";
    Reorder = 7:
        "reorder", "reorder a/0 1% by=200us", "packets are held back, so that later ones overtake \
                                               them";
    Rate = 8:
        "rate", "rate a/0 1Gbit", "all processes of the NIC together send, and receive, no more \
                                   than that at each port";
    Delay = 9:
        "delay", "delay a/0 5ms", "packets are late by this, each direction";
        "delay", "delay a/0/2 5ms", "the same for port 2 alone, as 'delay rail0b 5ms' for all \
                                     second ports; so can all that packets suffer";
    Jitter = 10:
        "jitter", "jitter a/0 1ms", "packets are late by a random time up to this, in order";
}

/// What a kind does, as far as it matters to who plays with all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sort {
    /// It takes a path away.
    Breakdown,
    /// It strikes one QP.
    Strike,
    /// It makes a path worse.
    Impairment,
}

impl Kind {
    pub(crate) const fn sort(self) -> Sort {
        match self {
            Kind::NicDead | Kind::Down | Kind::Flap => Sort::Breakdown,
            Kind::WqeError => Sort::Strike,
            Kind::Loss | Kind::BurstLoss | Kind::Corrupt | Kind::Duplicate => Sort::Impairment,
            Kind::Reorder | Kind::Rate | Kind::Delay | Kind::Jitter => Sort::Impairment,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::Fault;
    use std::collections::HashSet;

    #[test]
    fn every_form_is_a_fault_of_its_kind_and_word() {
        for form in FAULT_FORMS {
            let fault: Fault = form.example.parse().unwrap();
            assert_eq!((fault.to_string().as_str(), fault.kind()), (form.example, form.kind));
            assert_eq!(form.example.split(' ').next(), Some(form.word));
        }
        let numbers: HashSet<u8> = Kind::ALL.iter().map(|kind| *kind as u8).collect();
        assert_eq!(numbers.len(), Kind::ALL.len());
        assert!(!numbers.contains(&0), "that is a free entry");
    }

    /// What is not written in Rust knows every form, too: the page for people, and the programs
    /// that are driven through all faults.
    #[test]
    fn the_page_and_the_tests_know_every_kind() {
        let read = |path: &str| {
            std::fs::read_to_string(format!("{}/../../../{path}", env!("CARGO_MANIFEST_DIR")))
                .unwrap()
        };
        let (page, churn) = (read("docs/reference/faults.md"), read("tests/e2e/test_churn.py"));
        for form in FAULT_FORMS {
            let row = page
                .lines()
                .any(|l| l.starts_with("| ") && l.contains(&format!("`{}`", form.example)));
            assert!(row, "docs/reference/faults.md has no row with `{}`", form.example);
            assert!(
                churn.contains(&format!("(\"{} ", form.word)),
                "tests/e2e/test_churn.py has no '{}'",
                form.word
            );
        }
    }
}

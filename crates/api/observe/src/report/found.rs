//! The incidents that were found so far, and the ways to those that the next event may belong to.
//!
//! A log may have a million events, and each could belong to any incident before it. So there is a
//! list of incidents for each NIC, for each place of a fault, and so on, the latest last. Events
//! come in the order of time: an incident that one of them is too late for is too old for all that
//! follow, and leaves the list. So each list is gone through once, however long it is.

use std::collections::HashMap;

use unbroken_events::fault_place;

use super::incidents::Incident;

/// Incidents that are looked after; nothing is known of those beyond but their number.
const MAX_FOUND: usize = 200_000;

/// Incidents by their numbers, the oldest first.
#[derive(Default)]
pub(super) struct Found {
    pub(super) all: Vec<Incident>,
    /// Those beyond [`MAX_FOUND`].
    pub(super) beyond: usize,
    /// All that an event may belong to by its time.
    recent: Vec<usize>,
    /// By the NICs that they are of.
    of_nic: HashMap<String, Vec<usize>>,
    /// Faults that were set, by their places: a NIC or a rail.
    at_place: HashMap<String, Vec<usize>>,
    /// Faults that are set, by their words.
    open_faults: HashMap<String, Vec<usize>>,
    /// Failures that nobody has set and that are not over, by NIC.
    open_of_nic: HashMap<String, Vec<usize>>,
    /// The last one of each NIC.
    last_of_nic: HashMap<String, usize>,
}

impl Found {
    /// A new incident; gives its number, if there is room.
    pub(super) fn begin(
        &mut self,
        what: String,
        at: u64,
        fill: impl FnOnce(&mut Incident),
    ) -> Option<usize> {
        if self.all.len() == MAX_FOUND {
            self.beyond += 1;
            return None;
        }
        let number = self.all.len();
        let mut new = Incident { what, began_us: at, last_us: at, ..Incident::default() };
        fill(&mut new);
        if new.is_fault_set {
            self.open_faults.entry(new.what.clone()).or_default().push(number);
            if let Some(place) = fault_place(&new.what) {
                self.at_place.entry(place.into()).or_default().push(number);
            }
        }
        self.recent.push(number);
        self.all.push(new);
        Some(number)
    }

    /// Changes an incident, which may be one of more NICs afterwards.
    pub(super) fn change(&mut self, number: usize, change: impl FnOnce(&mut Incident)) {
        let incident = &mut self.all[number];
        let before = incident.nics.len();
        change(incident);
        let (added, is_set) = (incident.nics[before..].to_vec(), incident.is_fault_set);
        for nic in added {
            let last = self.last_of_nic.entry(nic.clone()).or_default();
            *last = number.max(*last);
            if !is_set {
                insert(self.open_of_nic.entry(nic.clone()).or_default(), number);
            }
            insert(self.of_nic.entry(nic).or_default(), number);
        }
    }

    /// The latest incident that something may belong to that began then.
    pub(super) fn nearest(&mut self, at: u64) -> Option<usize> {
        latest(&self.all, &mut self.recent, at)
    }

    /// The latest one of one of these NICs that something may belong to that began then.
    pub(super) fn near<'a>(
        &mut self,
        nics: impl Iterator<Item = &'a str>,
        at: u64,
    ) -> Option<usize> {
        let mut found = None;
        for nic in nics {
            let rail = nic.rsplit_once('/').map(|(_, index)| format!("rail{index}"));
            let all = &self.all;
            let last = |list: Option<&mut Vec<usize>>| latest(all, list?, at);
            let of_nic = last(self.of_nic.get_mut(nic));
            let at_it = last(self.at_place.get_mut(nic));
            let at_rail = rail.and_then(|rail| last(self.at_place.get_mut(&rail)));
            found = found.max(of_nic).max(at_it).max(at_rail);
        }
        found
    }

    /// The fault of these words that was set last and not taken away.
    pub(super) fn open_fault(&mut self, fault: &str) -> Option<&mut Incident> {
        let number = self.open_faults.get_mut(fault)?.pop()?;
        Some(&mut self.all[number])
    }

    /// A NIC works again: what nobody had set is over. What follows soon belongs to it, however
    /// long ago it began.
    pub(super) fn works_again(&mut self, nic: &str, at: u64) {
        for number in self.open_of_nic.remove(nic).unwrap_or_default() {
            let incident = &mut self.all[number];
            if incident.over_us > 0 {
                continue;
            }
            incident.over_us = at;
            insert(&mut self.recent, number);
            for nic in &incident.nics {
                insert(self.of_nic.entry(nic.clone()).or_default(), number);
            }
        }
    }

    /// The last incident of one of these NICs.
    pub(super) fn last_of_nics<'a>(
        &mut self,
        nics: impl Iterator<Item = &'a str>,
    ) -> Option<&mut Incident> {
        let number = nics.filter_map(|nic| self.last_of_nic.get(nic)).max()?;
        Some(&mut self.all[*number])
    }
}

/// The last of a list that something may belong to that began then. Those behind it that are too
/// old leave the list; they are the only ones that are passed over, as none is of a later time.
fn latest(all: &[Incident], list: &mut Vec<usize>, at: u64) -> Option<usize> {
    while let Some(number) = list.last() {
        if all[*number].is_near(at) {
            return Some(*number);
        }
        list.pop();
    }
    None
}

/// Puts a number into its place; it nearly always is the last.
fn insert(list: &mut Vec<usize>, number: usize) {
    let place = list.partition_point(|known| *known < number);
    if list.get(place) != Some(&number) {
        list.insert(place, number);
    }
}

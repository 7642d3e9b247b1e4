//! A model of a server: it keeps what it is told, in a time of its own, and fails or waits as a
//! test wants it.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use super::command::{Command, Connect, Reply, Store, MAX_LINES, TABLE};

type Fields = BTreeMap<Vec<u8>, Vec<u8>>;

/// What lies on it, and what it shall do.
#[derive(Default)]
pub(super) struct Data {
    /// The server's time.
    pub(super) time_ms: u64,
    /// Values, and when they expire.
    pub(super) values: BTreeMap<String, (Vec<u8>, u64)>,
    /// Tables, and when they expire.
    pub(super) tables: BTreeMap<String, (Fields, u64)>,
    pub(super) logs: HashMap<String, Vec<(u64, Vec<u8>)>>,
    /// Why nobody can connect.
    pub(super) away: Option<String>,
    /// Each round takes so long.
    pub(super) delay: Duration,
    /// The round after so many ends in this trouble, before or after it was carried out.
    pub(super) break_after: Option<(u32, bool)>,
    pub(super) connects: u32,
    pub(super) rounds: u32,
}

impl Data {
    /// All is lost, as with a server that starts anew.
    pub(super) fn lose(&mut self) {
        self.values.clear();
        self.tables.clear();
        self.logs.clear();
    }

    /// The names of what lies on it and has not expired.
    pub(super) fn names(&self, kind: &str) -> Vec<&str> {
        let values = self.values.iter().map(|(name, (_, until))| (name, *until));
        let filled = self.tables.iter().filter(|(_, (fields, _))| !fields.is_empty());
        let tables = filled.map(|(name, (_, until))| (name, *until));
        let lives = |(name, until): &(&String, u64)| *until > self.time_ms && name.contains(kind);
        values.chain(tables).filter(lives).map(|(name, _)| name.as_str()).collect()
    }

    fn set_field(&mut self, name: &str, field: &[u8], value: &[u8], lease_ms: u64) {
        let until = self.time_ms + lease_ms;
        let table = self.tables.entry(name.into()).or_default();
        if table.1 <= self.time_ms {
            table.0.clear();
        }
        table.0.insert(field.into(), value.into());
        table.1 = until;
    }

    fn carry_out(&mut self, command: &Command) -> Reply {
        let now = self.time_ms;
        match command {
            Command::Time => Reply::Time(now),
            Command::Claim { name, value } => {
                let free = !self.values.contains_key(name);
                self.values.entry(name.clone()).or_insert((value.clone(), u64::MAX));
                Reply::Claimed(free)
            }
            Command::Get(name) => {
                let value = self.values.get(name).filter(|(_, until)| *until > now);
                Reply::Value(value.map(|(value, _)| value.clone()))
            }
            Command::Set { name, value, lease_ms } => {
                self.values.insert(name.clone(), (value.clone(), now + lease_ms));
                Reply::Done
            }
            Command::SetSole { name, field, value, lease_ms } => {
                self.tables.remove(name);
                self.set_field(name, field, value, *lease_ms);
                Reply::Done
            }
            Command::SetField { name, field, value, lease_ms } => {
                self.set_field(name, field, value, *lease_ms);
                self.set_field(name, TABLE, b"", *lease_ms);
                Reply::Done
            }
            Command::DeleteField { name, field } => {
                if let Some((fields, _)) = self.tables.get_mut(name) {
                    fields.remove(field);
                }
                Reply::Done
            }
            Command::Fields(name) => {
                let table = self.tables.get(name).filter(|(_, until)| *until > now);
                let fields = table.into_iter().flat_map(|(fields, _)| fields);
                Reply::Fields(fields.map(|(field, value)| (field.clone(), value.clone())).collect())
            }
            Command::Announce { name, line, .. } => {
                self.logs.entry(name.clone()).or_default().push((now, line.clone()));
                Reply::Done
            }
            Command::Since { name, id } => {
                let (ms, number) = id.split_once('-').unwrap();
                let after: (u64, usize) = (ms.parse().unwrap(), number.parse().unwrap());
                let lines = self.logs.entry(name.clone()).or_default().iter().enumerate();
                // The number of a line in an id begins with 1, so that `ms-0` is before all lines
                // of that time.
                let later = lines.filter(|(i, (at, _))| (*at, i + 1) > after).take(MAX_LINES);
                Reply::Lines(
                    later
                        .map(|(i, (at, line))| (format!("{at}-{}", i + 1), line.clone()))
                        .collect(),
                )
            }
        }
    }
}

/// The server. Clones are the same one.
#[derive(Clone, Default)]
pub(super) struct Fake(Arc<Mutex<Data>>);

impl Fake {
    pub(super) fn data(&self) -> MutexGuard<'_, Data> {
        self.0.lock().unwrap()
    }
}

impl Connect for Fake {
    fn connect(&mut self) -> Result<Box<dyn Store>, String> {
        let mut data = self.data();
        data.connects += 1;
        match &data.away {
            Some(why) => Err(why.clone()),
            None => Ok(Box::new(self.clone())),
        }
    }
}

impl Store for Fake {
    fn run(&mut self, commands: &[Command]) -> Result<Vec<Reply>, String> {
        let delay = self.data().delay;
        std::thread::sleep(delay);
        let mut data = self.data();
        data.rounds += 1;
        let trouble = match &mut data.break_after {
            Some((0, _)) => data.break_after.take(),
            Some((rounds, _)) => {
                *rounds -= 1;
                None
            }
            None => None,
        };
        if let Some(why) = data.away.clone() {
            return Err(why);
        }
        match trouble {
            Some((_, false)) => Err("broken before".into()),
            Some((_, true)) => {
                commands.iter().for_each(|command| {
                    data.carry_out(command);
                });
                Err("broken after".into())
            }
            None => Ok(commands.iter().map(|command| data.carry_out(command)).collect()),
        }
    }
}

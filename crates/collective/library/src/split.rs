//! Communicators out of one: ranks of a colour make one of their own, in the order of their keys.
//!
//! A split is an operation of all ranks of the old communicator, and has its turn, its deadline and
//! its errors: each rank says its colour, its key, and where others will reach it, and hears what
//! all say. So all compute who is in which new communicator, as which rank, and nobody need meet
//! anybody: services were taken before anything was said. The secret is that of the old
//! communicator, and is not said again; a service's name, which nobody can foresee, is what keeps
//! communicators apart. What fails on the way is survived, or breaks the old communicator, as it
//! would in any other operation.
//!
//! A rank that cannot take part, for want of sockets say, tells that instead, and its colour gets
//! an error at all of its ranks; the old communicator is well.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use unbroken_collective_protocol::agree::Description;
use unbroken_collective_protocol::Rank;
use unbroken_schedule::{Counts, DataType, Operation};

use crate::acceptor::{self, Registration};
use crate::auth::ServiceName;
use crate::bootstrap::Hello;
use crate::channel::ALL;
use crate::communicator::{Communicator, Site};
use crate::error::{Error, Result};
use crate::limits::want_descriptors;
use crate::operands::{Buffers, Spans};
use crate::options::Options;

/// What each rank says has so many bytes, spaces behind it: a gather of equal parts.
const SAID_BYTES: usize = 512;
/// Of why a rank cannot take part so many characters are told; a quoted one takes two bytes.
const MAX_WHY: usize = 200;

/// What a rank says.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
struct Said {
    /// `None`: it takes part in no new communicator.
    colour: Option<u32>,
    key: i32,
    /// How others will reach it; or why it cannot take part.
    offer: std::result::Result<Offer, String>,
}

/// What others must know of a rank of a new communicator.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
struct Offer {
    address: SocketAddr,
    service: ServiceName,
    /// What all must have alike.
    settings: String,
}

impl Communicator {
    /// Makes new communicators of the ranks of this one: those that give the same colour are
    /// together, in the order of their keys; those with equal keys in the order of their ranks
    /// here. Without a colour a rank takes part in none, and gets `None`. All ranks must call it,
    /// and it has its turn among the other operations of all ranks. Options are those of this
    /// communicator, which is not changed by it.
    pub fn split(&self, colour: Option<u32>, key: i32) -> Result<Option<Communicator>> {
        self.split_with(colour, key, self.options.clone())
    }

    /// Makes new communicators of the ranks of this one, as [`Communicator::split`] does, with
    /// other options. All ranks of a colour must have the same.
    pub fn split_with(
        &self,
        colour: Option<u32>,
        key: i32,
        options: Options,
    ) -> Result<Option<Communicator>> {
        self.split_at(colour, key, self.site.at, options)
    }

    /// Makes new communicators of the ranks of this one, as [`Communicator::split`] does, with
    /// other options and another address: `at`, one of this machine, is where others reach this
    /// rank of the new communicator out of band.
    pub fn split_at(
        &self,
        colour: Option<u32>,
        key: i32,
        at: IpAddr,
        options: Options,
    ) -> Result<Option<Communicator>> {
        options.check()?;
        let service = |_| {
            want_descriptors(self.ranks(), self.site.host.nic_count())?;
            acceptor::register(at, self.secret)
        };
        let taken = colour.map(service).transpose();
        let (offer, registration) = match taken {
            Ok(Some(registration)) => (Ok(offer(&registration, &options)), Some(registration)),
            Ok(None) => (Err(String::new()), None),
            Err(error) => (Err(short(&error.to_string())), None),
        };
        let all = self.say(&Said { colour, key, offer })?;
        let Some(colour) = colour else { return Ok(None) };
        let members = members(&all, colour);
        let hellos = greetings(&all, &members, &self.site.all)?;
        let me = members.iter().position(|rank| *rank == self.rank());
        // What this rank has said is among what all have.
        let (Some(me), Some(registration)) = (me, registration) else {
            return Err(Error::Bootstrap(
                "what this rank has said of itself came back as something else".into(),
            ));
        };
        let site = Site { host: self.site.host.clone(), at, all: hellos };
        Communicator::among(site, self.secret, me, registration, options).map(Some)
    }

    /// Tells all ranks, and hears all, by rank.
    fn say(&self, said: &Said) -> Result<Vec<Said>> {
        let operation = Operation::AllGather { counts: Counts::Equal(SAID_BYTES as u64) };
        let (input, mut output) = (encode(said)?, vec![0; SAID_BYTES * self.ranks()]);
        let spans = Spans::of(Buffers::Apart { input: &input, output: &mut output });
        let collective = self.admit(ALL, &operation, DataType::U8, &spans)?;
        self.enqueue_as(Description::split(), ALL, collective, spans, None)?.finish_lent()?;
        let decode = |(rank, bytes): (Rank, &[u8])| {
            serde_json::from_slice(bytes).map_err(|_| {
                Error::Bootstrap(format!(
                    "what rank {rank} says of itself makes no sense; all ranks need one build"
                ))
            })
        };
        output.chunks(SAID_BYTES).enumerate().map(decode).collect()
    }
}

/// What others must know of a service.
fn offer(registration: &Registration, options: &Options) -> Offer {
    Offer {
        address: registration.address(),
        service: registration.name,
        settings: options.settings(),
    }
}

/// As much of a reason as finds room.
fn short(why: &str) -> String {
    why.chars()
        .map(|c| if c.is_ascii_graphic() || c == ' ' { c } else { '?' })
        .take(MAX_WHY)
        .collect()
}

fn encode(said: &Said) -> Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec(said).map_err(|e| Error::Bootstrap(e.to_string()))?;
    if bytes.len() > SAID_BYTES {
        return Err(Error::Bootstrap(format!(
            "{} bytes about this rank find no room in {SAID_BYTES}",
            bytes.len()
        )));
    }
    bytes.resize(SAID_BYTES, b' ');
    Ok(bytes)
}

/// The ranks of a colour, in the order that they will have.
fn members(all: &[Said], colour: u32) -> Vec<Rank> {
    let mut members: Vec<Rank> =
        (0..all.len()).filter(|rank| all[*rank].colour == Some(colour)).collect();
    members.sort_by_key(|rank| (all[*rank].key, *rank));
    members
}

/// What the ranks of a new communicator know of each other, if all can take part; hosts and NICs
/// are what they were.
fn greetings(all: &[Said], members: &[Rank], before: &[Hello]) -> Result<Vec<Hello>> {
    let refuse = |rank: Rank, why: String| {
        Err(Error::Bootstrap(format!("rank {rank} cannot take part in the split: {why}")))
    };
    let mut expected: Option<(Rank, &str)> = None;
    let mut hellos = Vec::with_capacity(members.len());
    for rank in members {
        let offer = match &all[*rank].offer {
            Ok(offer) => offer,
            Err(why) => return refuse(*rank, why.clone()),
        };
        let (first, settings) = *expected.get_or_insert((*rank, &offer.settings));
        if offer.settings != settings {
            let why = format!(
                "its settings ({}) are not those of rank {first} ({settings}): give all of a \
                 colour the same",
                offer.settings
            );
            return refuse(*rank, why);
        }
        hellos.push(Hello {
            rank: hellos.len(),
            ranks: members.len(),
            address: offer.address,
            service: offer.service,
            settings: offer.settings.clone(),
            ..before[*rank].clone()
        });
    }
    Ok(hellos)
}

#[cfg(test)]
mod tests {
    use super::*;
    use unbroken_schedule::Form;

    fn said(colour: Option<u32>, key: i32) -> Said {
        let settings = Options::default().settings();
        let offer = Offer { address: "10.0.0.1:5".parse().unwrap(), service: [7; 16], settings };
        Said { colour, key, offer: Ok(offer) }
    }

    fn hellos(ranks: usize) -> Vec<Hello> {
        let hello = |rank| {
            let (host, address) = (format!("host{}", rank % 2), "10.0.0.1:4".parse().unwrap());
            let (nics_mbps, service, settings) = (vec![100], [0; 16], String::new());
            let nodes = crate::numa::Nodes::default();
            Hello {
                rank,
                ranks,
                host,
                nics_mbps,
                nodes,
                address,
                service,
                settings,
                patience_ms: 0,
            }
        };
        (0..ranks).map(hello).collect()
    }

    #[test]
    fn ranks_of_a_colour_are_in_the_order_of_keys_and_then_of_ranks() {
        let all = [
            said(Some(1), 5),
            said(Some(0), 0),
            said(None, 0),
            said(Some(1), -5),
            said(Some(1), 5),
        ];
        assert_eq!(members(&all, 1), [3, 0, 4]);
        assert_eq!(members(&all, 0), [1]);
        let new = greetings(&all, &[3, 0, 4], &hellos(5)).unwrap();
        let places: Vec<(usize, &str)> =
            new.iter().map(|hello| (hello.rank, hello.host.as_str())).collect();
        assert_eq!(places, [(0, "host1"), (1, "host0"), (2, "host0")]);
        assert_eq!(new[0].address.port(), 5, "not where the old communicator is reached");
    }

    #[test]
    fn who_cannot_take_part_is_named_with_its_reason() {
        let mut all = [said(Some(1), 0), said(Some(1), 0), said(Some(2), 0)];
        let says = |all: &[Said], colour| {
            greetings(all, &members(all, colour), &hellos(3)).map(drop).map_err(|e| e.to_string())
        };
        all[1].offer = Err("no sockets".into());
        assert_eq!(says(&all, 1), Err("rank 1 cannot take part in the split: no sockets".into()));
        assert_eq!(says(&all, 2), Ok(()), "that is the affair of its colour");
        all[1] = said(Some(1), 0);
        if let Ok(offer) = &mut all[1].offer {
            offer.settings = "others".into();
        }
        assert!(says(&all, 1)
            .unwrap_err()
            .contains("its settings (others) are not those of rank 0 (logical false"));
    }

    #[test]
    fn what_is_said_has_room() {
        let mut longest = said(Some(u32::MAX), i32::MIN);
        if let Ok(offer) = &mut longest.offer {
            offer.address =
                "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff%4294967295]:65535".parse().unwrap();
            offer.service = [255; 16];
            let most = std::time::Duration::MAX;
            offer.settings = Options {
                slots: u32::MAX,
                payload_bytes: u32::MAX,
                nic_mbps: u32::MAX,
                timeout: most,
                shape: Some(Form::RootedTree),
                ..Options::default()
            }
            .settings();
        }
        let cannot =
            Said { offer: Err(short(&"\"\u{1}".repeat(999))), ..said(Some(u32::MAX), i32::MIN) };
        for said in [longest, cannot] {
            let bytes = encode(&said).unwrap();
            assert_eq!(bytes.len(), SAID_BYTES);
            assert_eq!(serde_json::from_slice::<Said>(&bytes).unwrap(), said);
        }
        assert!(encode(&Said { offer: Err("x".repeat(SAID_BYTES)), ..said(None, 0) }).is_err());
    }
}

//! What ranks tell each other out of band, over TCP: how paths are made and given up, and what all
//! must hear.
//!
//! As bytes: a tag, numbers in little-endian order, and byte strings behind their length. Nothing
//! is believed of a length: what does not fit the bytes that came is no message.

use crate::agree::Terms;
use crate::codec::{Reader, Writer};
use crate::locate::{Place, Verdict};
use crate::picture::{Picture, Report};
use crate::{Failure, Rank};

/// From one rank to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Make paths to me: I have something to send, and it is for you to begin.
    Want,
    /// A queue pair (or shared memory) for a path; what to connect to.
    Offer {
        /// The rail.
        rail: u8,
        /// Which life of the path.
        life: u32,
        /// The NICs that it joins: that of the lower rank, that of the higher.
        nics: [u8; 2],
        /// What the shell of the other end needs.
        address: Vec<u8>,
    },
    /// The other end of it, connected.
    Accept {
        /// The rail.
        rail: u8,
        /// Which life of the path.
        life: u32,
        /// What the shell of the other end needs.
        address: Vec<u8>,
    },
    /// The path was tried and carries.
    Carries {
        /// The rail.
        rail: u8,
        /// Which life of the path.
        life: u32,
    },
    /// This end of the path is closed, and nothing more comes over it.
    Closed {
        /// The rail.
        rail: u8,
        /// Which life of the path.
        life: u32,
        /// Of each stream from you to me, what has arrived and what was used.
        counts: Vec<(u64, u64)>,
    },
    /// For all ranks: handed on along the tree.
    News(News),
    /// A question of a localisation, or the answer to one.
    Probe(Probe),
    /// For rank 0: what a rank has measured. Handed on along the tree.
    Measured(Report),
    /// A piece of a frame, where no NIC carries it.
    Piece {
        /// Which life of the path out of band.
        life: u32,
        /// The stream.
        stream: u8,
        /// The frame's number.
        seq: u64,
        /// Where the piece begins in the frame, in bytes.
        offset: u32,
        /// Bytes of the whole frame.
        total: u32,
        /// The piece.
        bytes: Vec<u8>,
    },
    /// A piece of so many bytes was taken.
    Taken {
        /// Which life of the path out of band.
        life: u32,
        /// How many.
        bytes: u32,
    },
    /// A notice that no NIC carries.
    Notice {
        /// Which life of the path out of band.
        life: u32,
        /// As an immediate.
        notice: u32,
    },
}

/// What all ranks must hear.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// The communicator is broken.
    Broken(Failure),
    /// A rank has no more to do with the communicator.
    Left {
        /// The rank.
        rank: Rank,
        /// How many operations of all ranks it has done.
        done: u64,
    },
    /// What a rank takes an operation for.
    Takes {
        /// The rank.
        rank: Rank,
        /// The operation.
        number: u64,
        /// What it takes it for.
        terms: Terms,
    },
    /// A rank begins no more operations than these, and leaves when they are done.
    Ends {
        /// The rank.
        rank: Rank,
        /// Operations of all ranks that it has begun, or will begin.
        begun: u64,
        /// The same of operations between two ranks: with whom, how many it sends, how many it
        /// receives. With others there are none.
        pairs: Vec<(Rank, u64, u64)>,
    },
    /// What is wrong with a path, or is no more.
    Verdict(Verdict),
    /// The picture that operations shall be planned with.
    Propose {
        /// Its number.
        view: u32,
        /// The picture.
        picture: Picture,
    },
    /// A rank has begun so many operations, and begins no other until all have agreed.
    Holds {
        /// The rank.
        rank: Rank,
        /// The view.
        view: u32,
        /// Operations that it has begun.
        begun: u64,
    },
    /// The view holds from this operation on.
    Agreed {
        /// The view.
        view: u32,
        /// The first operation that is planned with it.
        from: u64,
    },
    /// A NIC of a host is well again.
    Healed {
        /// The NIC.
        place: Place,
    },
}

/// A part of a localisation. `id` names it among those of the rank that asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Probe {
    /// Probe a rank over a rail for me.
    Ask {
        /// The localisation.
        id: u32,
        /// Whom.
        target: Rank,
        /// Over which rail.
        rail: u8,
    },
    /// The result.
    Told {
        /// The localisation.
        id: u32,
        /// Who was probed.
        target: Rank,
        /// What came of it.
        outcome: crate::locate::Outcome,
    },
    /// A probe queue pair wants a partner.
    Offer {
        /// The prober's number for it.
        id: u32,
        /// The rail.
        rail: u8,
        /// What to connect to.
        address: Vec<u8>,
    },
    /// The partner; empty where there can be none: the NIC is dead.
    Accept {
        /// The prober's number for it.
        id: u32,
        /// What to connect to.
        address: Vec<u8>,
    },
    /// The partner can go.
    Over {
        /// The prober's number for it.
        id: u32,
    },
}

impl Message {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        match self {
            Message::Want => w.u8(0),
            Message::Offer { rail, life, nics, address } => {
                w.u8(1).u8(*rail).u32(*life).u8(nics[0]).u8(nics[1]).bytes(address)
            }
            Message::Accept { rail, life, address } => w.u8(2).u8(*rail).u32(*life).bytes(address),
            Message::Carries { rail, life } => w.u8(3).u8(*rail).u32(*life),
            Message::Closed { rail, life, counts } => {
                w.u8(4).u8(*rail).u32(*life).u32(counts.len() as u32);
                counts.iter().for_each(|(arrived, used)| {
                    w.u64(*arrived).u64(*used);
                });
                &mut w
            }
            Message::News(news) => {
                w.u8(5);
                news.encode(&mut w);
                &mut w
            }
            Message::Probe(probe) => {
                w.u8(6);
                probe.encode(&mut w);
                &mut w
            }
            Message::Measured(report) => {
                report.encode(w.u8(7));
                &mut w
            }
            Message::Piece { life, stream, seq, offset, total, bytes } => {
                w.u8(8).u32(*life).u8(*stream).u64(*seq).u32(*offset).u32(*total).bytes(bytes)
            }
            Message::Taken { life, bytes } => w.u8(9).u32(*life).u32(*bytes),
            Message::Notice { life, notice } => w.u8(10).u32(*life).u32(*notice),
        };
        w.0
    }

    /// From bytes; `None` if they are no message.
    pub fn decode(bytes: &[u8]) -> Option<Message> {
        let mut r = Reader(bytes);
        let message = match r.u8()? {
            0 => Message::Want,
            1 => Message::Offer {
                rail: r.u8()?,
                life: r.u32()?,
                nics: [r.u8()?, r.u8()?],
                address: r.bytes()?,
            },
            2 => Message::Accept { rail: r.u8()?, life: r.u32()?, address: r.bytes()? },
            3 => Message::Carries { rail: r.u8()?, life: r.u32()? },
            4 => Message::Closed {
                rail: r.u8()?,
                life: r.u32()?,
                counts: r.list(|r| Some((r.u64()?, r.u64()?)))?,
            },
            5 => Message::News(News::decode(&mut r)?),
            6 => Message::Probe(Probe::decode(&mut r)?),
            7 => Message::Measured(Report::decode(&mut r)?),
            8 => Message::Piece {
                life: r.u32()?,
                stream: r.u8()?,
                seq: r.u64()?,
                offset: r.u32()?,
                total: r.u32()?,
                bytes: r.bytes()?,
            },
            9 => Message::Taken { life: r.u32()?, bytes: r.u32()? },
            10 => Message::Notice { life: r.u32()?, notice: r.u32()? },
            _ => return None,
        };
        r.0.is_empty().then_some(message)
    }
}

impl News {
    fn encode(&self, w: &mut Writer) {
        match self {
            News::Broken(failure) => failure.encode(w.u8(0)),
            News::Left { rank, done } => {
                w.u8(1).rank(*rank).u64(*done);
            }
            News::Takes { rank, number, terms } => {
                terms.encode(w.u8(2).rank(*rank).u64(*number));
            }
            News::Verdict(verdict) => verdict.encode(w.u8(3)),
            News::Propose { view, picture } => picture.encode(w.u8(4).u32(*view)),
            News::Holds { rank, view, begun } => {
                w.u8(5).rank(*rank).u32(*view).u64(*begun);
            }
            News::Agreed { view, from } => {
                w.u8(6).u32(*view).u64(*from);
            }
            News::Healed { place } => place.encode(w.u8(7)),
            News::Ends { rank, begun, pairs } => {
                w.u8(8).rank(*rank).u64(*begun).u32(pairs.len() as u32);
                pairs.iter().for_each(|(peer, sends, receives)| {
                    w.rank(*peer).u64(*sends).u64(*receives);
                });
            }
        }
    }

    fn decode(r: &mut Reader<'_>) -> Option<News> {
        Some(match r.u8()? {
            0 => News::Broken(Failure::decode(r)?),
            1 => News::Left { rank: r.rank()?, done: r.u64()? },
            2 => News::Takes { rank: r.rank()?, number: r.u64()?, terms: Terms::decode(r)? },
            3 => News::Verdict(Verdict::decode(r)?),
            4 => News::Propose { view: r.u32()?, picture: Picture::decode(r)? },
            5 => News::Holds { rank: r.rank()?, view: r.u32()?, begun: r.u64()? },
            6 => News::Agreed { view: r.u32()?, from: r.u64()? },
            7 => News::Healed { place: Place::decode(r)? },
            8 => News::Ends {
                rank: r.rank()?,
                begun: r.u64()?,
                pairs: r.list(|r| Some((r.rank()?, r.u64()?, r.u64()?)))?,
            },
            _ => return None,
        })
    }
}

impl Probe {
    fn encode(&self, w: &mut Writer) {
        match self {
            Probe::Ask { id, target, rail } => w.u8(0).u32(*id).rank(*target).u8(*rail),
            Probe::Told { id, target, outcome } => {
                w.u8(1).u32(*id).rank(*target).u8(*outcome as u8)
            }
            Probe::Offer { id, rail, address } => w.u8(2).u32(*id).u8(*rail).bytes(address),
            Probe::Accept { id, address } => w.u8(3).u32(*id).bytes(address),
            Probe::Over { id } => w.u8(4).u32(*id),
        };
    }

    fn decode(r: &mut Reader<'_>) -> Option<Probe> {
        Some(match r.u8()? {
            0 => Probe::Ask { id: r.u32()?, target: r.rank()?, rail: r.u8()? },
            1 => Probe::Told {
                id: r.u32()?,
                target: r.rank()?,
                outcome: crate::locate::Outcome::decode(r.u8()?)?,
            },
            2 => Probe::Offer { id: r.u32()?, rail: r.u8()?, address: r.bytes()? },
            3 => Probe::Accept { id: r.u32()?, address: r.bytes()? },
            4 => Probe::Over { id: r.u32()? },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agree::Description;
    use crate::locate::{Fault, Outcome};
    use proptest::prelude::*;

    fn place() -> impl Strategy<Value = Place> {
        any::<(u32, u8)>().prop_map(|(host, rail)| Place { host, rail })
    }

    fn description() -> impl Strategy<Value = Description> {
        any::<(u8, u8, u8, u64, u32, u32, u64)>().prop_map(
            |(operation, data, reduce, count, root, to, tag)| Description {
                operation,
                data,
                reduce,
                count,
                root,
                to,
                tag,
            },
        )
    }

    fn terms() -> impl Strategy<Value = Terms> {
        (description(), prop::collection::vec(any::<u64>(), 0..9))
            .prop_map(|(description, counts)| Terms::said(description, counts))
    }

    fn failure() -> impl Strategy<Value = Failure> {
        let ranks = || (0usize..1 << 20, 0usize..1 << 20);
        prop_oneof![
            (any::<u64>(), ranks(), description(), description()).prop_map(
                |(number, (first, other), its, others)| {
                    Failure::Differs { number, first, its, other, others }
                }
            ),
            (any::<(u64, u8, u64, u64)>(), ranks()).prop_map(
                |((number, data, sent, awaited), (from, to))| {
                    Failure::Counts { number, data, from, to, sent, awaited }
                }
            ),
            ranks().prop_map(|(rank, _)| Failure::Lost { rank }),
            ranks().prop_map(|(rank, _)| Failure::Aborted { rank }),
            (ranks(), any::<u64>()).prop_map(|((rank, _), done)| Failure::Left { rank, done }),
            (ranks(), any::<(u64, u32)>(), prop::collection::vec(0usize..1 << 20, 0..9)).prop_map(
                |((by, from), (number, seconds), missing)| Failure::Stalled {
                    by,
                    number,
                    from,
                    missing,
                    seconds
                }
            ),
            (ranks(), any::<u32>()).prop_map(|((a, b), seconds)| Failure::Parted { a, b, seconds }),
            (ranks(), any::<u32>()).prop_map(|((rank, by), what)| Failure::Broke {
                rank,
                by,
                what
            }),
        ]
    }

    fn fault() -> impl Strategy<Value = Fault> {
        prop_oneof![
            (0usize..1 << 20).prop_map(Fault::Process),
            place().prop_map(Fault::Nic),
            place().prop_map(Fault::Cable),
            any::<u8>().prop_map(Fault::Switch),
            (place(), place()).prop_map(|(a, b)| Fault::Between(a, b)),
            (place(), place()).prop_map(|(a, b)| Fault::QueuePair(a, b)),
        ]
    }

    fn news() -> impl Strategy<Value = News> {
        let rank = || 0usize..1 << 20;
        prop_oneof![
            failure().prop_map(News::Broken),
            (rank(), any::<u64>()).prop_map(|(rank, done)| News::Left { rank, done }),
            (rank(), any::<u64>(), terms()).prop_map(|(rank, number, terms)| News::Takes {
                rank,
                number,
                terms
            }),
            (
                rank(),
                any::<u64>(),
                prop::collection::vec((rank(), any::<u64>(), any::<u64>()), 0..9)
            )
                .prop_map(|(rank, begun, pairs)| News::Ends { rank, begun, pairs }),
            (rank(), fault()).prop_map(|(by, fault)| News::Verdict(Verdict { by, fault })),
            (any::<u32>(), picture()).prop_map(|(view, picture)| News::Propose { view, picture }),
            (rank(), any::<(u32, u64)>()).prop_map(|(rank, (view, begun))| News::Holds {
                rank,
                view,
                begun
            }),
            any::<(u32, u64)>().prop_map(|(view, from)| News::Agreed { view, from }),
            place().prop_map(|place| News::Healed { place }),
        ]
    }

    fn picture() -> impl Strategy<Value = Picture> {
        let down = prop::collection::vec(any::<u64>(), 0..9);
        let slow = prop::collection::vec(any::<(u32, u8, u8)>(), 0..9);
        (down, any::<(u32, u32)>(), slow).prop_map(|(down, (mbps, alpha_ns), slow)| Picture {
            down,
            mbps,
            alpha_ns,
            slow,
        })
    }

    fn report() -> impl Strategy<Value = Report> {
        let rails_mbps = prop::collection::vec(any::<u32>(), 0..9);
        let paths = prop::collection::vec(any::<(u32, u8, u32)>(), 0..9);
        (0usize..99, any::<u32>(), rails_mbps, paths).prop_map(
            |(rank, alpha_ns, rails_mbps, paths)| Report { rank, alpha_ns, rails_mbps, paths },
        )
    }

    fn probe() -> impl Strategy<Value = Probe> {
        let address = || prop::collection::vec(any::<u8>(), 0..200);
        let outcomes = vec![
            Outcome::Unknown,
            Outcome::Answers,
            Outcome::Silent,
            Outcome::OwnNic,
            Outcome::ItsNic,
        ];
        prop_oneof![
            (any::<(u32, u8)>(), 0usize..99).prop_map(|((id, rail), target)| Probe::Ask {
                id,
                target,
                rail
            }),
            (any::<u32>(), 0usize..99, prop::sample::select(outcomes))
                .prop_map(|(id, target, outcome)| Probe::Told { id, target, outcome }),
            (any::<(u32, u8)>(), address()).prop_map(|((id, rail), address)| Probe::Offer {
                id,
                rail,
                address
            }),
            (any::<u32>(), address()).prop_map(|(id, address)| Probe::Accept { id, address }),
            any::<u32>().prop_map(|id| Probe::Over { id }),
        ]
    }

    fn message() -> impl Strategy<Value = Message> {
        let address = || prop::collection::vec(any::<u8>(), 0..200);
        prop_oneof![
            Just(Message::Want),
            (any::<(u8, u32, [u8; 2])>(), address()).prop_map(|((rail, life, nics), address)| {
                Message::Offer { rail, life, nics, address }
            }),
            (any::<(u8, u32)>(), address()).prop_map(|((rail, life), address)| Message::Accept {
                rail,
                life,
                address
            }),
            any::<(u8, u32)>().prop_map(|(rail, life)| Message::Carries { rail, life }),
            (any::<(u8, u32)>(), prop::collection::vec(any::<(u64, u64)>(), 0..9))
                .prop_map(|((rail, life), counts)| Message::Closed { rail, life, counts }),
            news().prop_map(Message::News),
            probe().prop_map(Message::Probe),
            report().prop_map(Message::Measured),
            (any::<(u32, u8, u64, u32, u32)>(), address()).prop_map(
                |((life, stream, seq, offset, total), bytes)| Message::Piece {
                    life,
                    stream,
                    seq,
                    offset,
                    total,
                    bytes
                }
            ),
            any::<(u32, u32)>().prop_map(|(life, bytes)| Message::Taken { life, bytes }),
            any::<(u32, u32)>().prop_map(|(life, notice)| Message::Notice { life, notice }),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_message_is_its_bytes(message in message(), cut in any::<prop::sample::Index>()) {
            let bytes = message.encode();
            prop_assert_eq!(Message::decode(&bytes), Some(message));
            prop_assert_eq!(Message::decode(&bytes[..cut.index(bytes.len())]), None, "a part of \
                                                                                      it");
        }

        #[test]
        fn any_bytes_are_a_message_or_none(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            if let Some(message) = Message::decode(&bytes) {
                prop_assert_eq!(message.encode(), bytes);
            }
        }
    }
}

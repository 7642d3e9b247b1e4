//! How both ends of a connection prove that they know the secret of an id, and how what they say
//! afterwards is kept theirs.
//!
//! The one that was called says a nonce. The caller answers with the *service* that it wants to
//! speak to, its rank, a nonce of its own and a MAC (HMAC-SHA256) over all of it; the called one
//! looks the service's secret up, checks the MAC, and proves itself by a MAC over the same. The
//! secret itself never leaves a process. Each direction has a key that follows from the secret and
//! both nonces; every message carries a MAC by it, over its place in the order and all its bytes.
//! Nothing is hidden: the network may be read by others, and not changed.
//!
//! | step | who | bytes |
//! | --- | --- | --- |
//! | greeting | called | magic 8 (the version is part of it), nonce 32 |
//! | introduction | caller | service 16, rank 4, nonce 32, MAC 32 |
//! | verdict | called | 1: welcome or refused; MAC 32 |
//! | message | both | length 4, channel 4, content, MAC 16 |

use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::error::{io, Result};

/// Bytes of a secret.
pub(crate) const SECRET_BYTES: usize = 16;
/// Bytes of a service's name.
pub(crate) const SERVICE_BYTES: usize = 16;
const NONCE_BYTES: usize = 32;
const MAC_BYTES: usize = 32;
/// Bytes of a MAC behind a message.
pub(crate) const TAG_BYTES: usize = 16;
/// Before a message: its length and its channel.
pub(crate) const HEAD_BYTES: usize = 8;
/// What a called one begins with. The last byte is the version.
const MAGIC: [u8; 8] = *b"ubcoll\0\x02";
pub(crate) const GREETING_BYTES: usize = MAGIC.len() + NONCE_BYTES;
pub(crate) const INTRODUCTION_BYTES: usize = SERVICE_BYTES + 4 + NONCE_BYTES + MAC_BYTES;
pub(crate) const VERDICT_BYTES: usize = 1 + MAC_BYTES;
const WELCOME: u8 = 1;
const REFUSED: u8 = 0;

/// What those who belong to a job know.
pub(crate) type Secret = [u8; SECRET_BYTES];
/// Whom a caller wants to speak to: a rank of a communicator, or those who meet.
pub(crate) type ServiceName = [u8; SERVICE_BYTES];
type Nonce = [u8; NONCE_BYTES];

/// Bytes that nobody can foresee, from the system.
pub(crate) fn draw<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| io("draw a random number")(e.into()))?;
    Ok(bytes)
}

fn mac(key: &[u8], label: &str, parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac =
        <Hmac<Sha256> as Mac>::new_from_slice(key).expect("HMAC takes keys of any length");
    mac.update(label.as_bytes());
    mac.update(&[0]);
    parts.iter().for_each(|part| mac.update(part));
    mac
}

/// What follows from a secret for a purpose.
pub(crate) fn derive(secret: &Secret, label: &str) -> [u8; MAC_BYTES] {
    mac(secret, label, &[]).finalize().into_bytes().into()
}

/// The service of those who meet by an id.
pub(crate) fn meeting_seat(secret: &Secret) -> ServiceName {
    let mut service = ServiceName::default();
    service.copy_from_slice(&derive(secret, "ubcoll meeting")[..SERVICE_BYTES]);
    service
}

/// What both ends have said before the MACs.
struct Said<'a> {
    theirs: &'a [u8],
    introduction: &'a [u8],
}

impl Said<'_> {
    fn mac(&self, secret: &Secret, label: &str) -> Hmac<Sha256> {
        // All parts have fixed lengths: service, rank and nonce of the caller.
        mac(secret, label, &[self.theirs, &self.introduction[..INTRODUCTION_BYTES - MAC_BYTES]])
    }

    fn keys(&self, secret: &Secret) -> [[u8; MAC_BYTES]; 2] {
        ["ubcoll of the caller", "ubcoll of the called"]
            .map(|label| self.mac(secret, label).finalize().into_bytes().into())
    }
}

/// The end that was called.
pub(crate) struct Called {
    greeting: [u8; GREETING_BYTES],
}

/// What a caller has introduced itself with.
pub(crate) struct Introduction<'a> {
    pub(crate) service: ServiceName,
    pub(crate) rank: usize,
    said: Said<'a>,
}

impl Called {
    pub(crate) fn new() -> Result<Called> {
        let mut greeting = [0; GREETING_BYTES];
        greeting[..MAGIC.len()].copy_from_slice(&MAGIC);
        greeting[MAGIC.len()..].copy_from_slice(&draw::<NONCE_BYTES>()?);
        Ok(Called { greeting })
    }

    /// What to say first.
    pub(crate) fn greeting(&self) -> &[u8] {
        &self.greeting
    }

    /// What a caller claims; `bytes` are a whole introduction.
    pub(crate) fn introduction<'a>(&'a self, bytes: &'a [u8]) -> Option<Introduction<'a>> {
        let bytes = bytes.get(..INTRODUCTION_BYTES)?;
        let service = bytes[..SERVICE_BYTES].try_into().ok()?;
        let rank =
            u32::from_le_bytes(bytes[SERVICE_BYTES..SERVICE_BYTES + 4].try_into().ok()?) as usize;
        Some(Introduction {
            service,
            rank,
            said: Said { theirs: &self.greeting[MAGIC.len()..], introduction: bytes },
        })
    }
}

impl Introduction<'_> {
    /// Whether the caller knows the secret. The verdict that tells it so, and the seals of both
    /// directions.
    pub(crate) fn admit(&self, secret: &Secret) -> Option<(Vec<u8>, Seals)> {
        let theirs = &self.said.introduction[INTRODUCTION_BYTES - MAC_BYTES..];
        self.said.mac(secret, "ubcoll caller").verify_slice(theirs).ok()?;
        let mut verdict = vec![WELCOME];
        verdict.extend(self.said.mac(secret, "ubcoll called").finalize().into_bytes());
        let [caller, called] = self.said.keys(secret);
        Some((verdict, Seals { own: Seal::new(called), other: Seal::new(caller) }))
    }
}

/// What is said to one who is not let in.
pub(crate) fn refusal() -> Vec<u8> {
    let mut verdict = vec![0; VERDICT_BYTES];
    verdict[0] = REFUSED;
    verdict
}

/// Why a call came to nothing.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Denied {
    /// The other end does not speak this protocol, or another version of it.
    UnknownProtocol,
    /// It knows no such service, or another secret.
    Refused,
    /// It does not know the secret.
    Impostor,
}

/// The calling end.
pub(crate) struct Caller {
    secret: Secret,
    service: ServiceName,
    rank: u32,
    nonce: Nonce,
    theirs: Nonce,
}

impl Caller {
    pub(crate) fn new(secret: Secret, service: ServiceName, rank: usize) -> Result<Caller> {
        Ok(Caller { secret, service, rank: rank as u32, nonce: draw()?, theirs: [0; NONCE_BYTES] })
    }

    fn claim(&self) -> Vec<u8> {
        [&self.service[..], &self.rank.to_le_bytes(), &self.nonce, &[0; MAC_BYTES]].concat()
    }

    /// The introduction that answers a whole greeting.
    pub(crate) fn introduction(&mut self, greeting: &[u8]) -> std::result::Result<Vec<u8>, Denied> {
        let nonce = greeting.strip_prefix(&MAGIC).ok_or(Denied::UnknownProtocol)?;
        self.theirs.copy_from_slice(nonce.get(..NONCE_BYTES).ok_or(Denied::UnknownProtocol)?);
        let mut introduction = self.claim();
        let mac = Said { theirs: &self.theirs, introduction: &introduction }
            .mac(&self.secret, "ubcoll caller")
            .finalize()
            .into_bytes();
        introduction[INTRODUCTION_BYTES - MAC_BYTES..].copy_from_slice(&mac);
        Ok(introduction)
    }

    /// What a whole verdict says.
    pub(crate) fn hear(&self, verdict: &[u8]) -> std::result::Result<Seals, Denied> {
        let (Some(&WELCOME), Some(mac)) = (verdict.first(), verdict.get(1..VERDICT_BYTES)) else {
            return Err(Denied::Refused);
        };
        let introduction = self.claim();
        let said = Said { theirs: &self.theirs, introduction: &introduction };
        said.mac(&self.secret, "ubcoll called").verify_slice(mac).map_err(|_| Denied::Impostor)?;
        let [caller, called] = said.keys(&self.secret);
        Ok(Seals { own: Seal::new(caller), other: Seal::new(called) })
    }
}

/// The seals of a connection's directions.
pub(crate) struct Seals {
    /// For what this end says.
    pub(crate) own: Seal,
    /// For what it hears.
    pub(crate) other: Seal,
}

/// Seals the messages of one direction, or checks them: each once and in order.
pub(crate) struct Seal {
    key: Hmac<Sha256>,
    count: u64,
}

/// A message that was heard: its channel, its content, and how many bytes all of it has.
pub(crate) type Heard<'a> = (u32, &'a [u8], usize);

impl Seal {
    fn new(key: [u8; MAC_BYTES]) -> Seal {
        Seal { key: mac(&key, "ubcoll message", &[]), count: 0 }
    }

    fn tag(&mut self, framed: &[u8]) -> Hmac<Sha256> {
        let tag = self.key.clone().chain_update(self.count.to_le_bytes()).chain_update(framed);
        self.count += 1;
        tag
    }

    /// Appends the tag of a framed message that begins at `from`.
    pub(crate) fn close(&mut self, bytes: &mut Vec<u8>, from: usize) {
        let tag = self.tag(&bytes[from..]).finalize().into_bytes();
        bytes.extend(&tag[..TAG_BYTES]);
    }

    /// The next message, if it is whole. An error: it is too long, or not what the other end has
    /// said.
    pub(crate) fn open<'a>(
        &mut self,
        bytes: &'a [u8],
        most: usize,
    ) -> std::result::Result<Option<Heard<'a>>, Denied> {
        let Some(head) = bytes.get(..HEAD_BYTES) else { return Ok(None) };
        let (len, channel) = (number(&head[..4]) as usize, number(&head[4..]));
        if len > most {
            return Err(Denied::Impostor);
        }
        let Some(tag) = bytes.get(HEAD_BYTES + len..HEAD_BYTES + len + TAG_BYTES) else {
            return Ok(None);
        };
        let framed = &bytes[..HEAD_BYTES + len];
        self.tag(framed).verify_truncated_left(tag).map_err(|_| Denied::Impostor)?;
        Ok(Some((channel, &framed[HEAD_BYTES..], HEAD_BYTES + len + TAG_BYTES)))
    }
}

/// A message with its length and channel, to be sealed.
pub(crate) fn frame(channel: u32, content: &[u8]) -> Vec<u8> {
    [&(content.len() as u32).to_le_bytes()[..], &channel.to_le_bytes(), content].concat()
}

/// A number of four bytes.
fn number(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(bytes.try_into().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECRET: Secret = [7; SECRET_BYTES];
    const SERVICE: ServiceName = [9; SERVICE_BYTES];

    fn greeted(secret: Secret) -> (Called, Caller, Vec<u8>) {
        let (called, mut caller) =
            (Called::new().unwrap(), Caller::new(secret, SERVICE, 3).unwrap());
        let introduction = caller.introduction(called.greeting()).unwrap();
        (called, caller, introduction)
    }

    #[test]
    fn those_who_know_the_secret_hear_each_other_and_it_is_never_said() {
        let (called, caller, bytes) = greeted(SECRET);
        let introduction = called.introduction(&bytes).unwrap();
        assert_eq!((introduction.service, introduction.rank), (SERVICE, 3));
        let (verdict, mut theirs) = introduction.admit(&SECRET).unwrap();
        let mut ours = caller.hear(&verdict).unwrap();
        for said in [called.greeting(), &bytes, &verdict] {
            assert!(!said.windows(SECRET_BYTES).any(|w| w == SECRET));
        }
        for k in 0..3 {
            let mut bytes = frame(k, b"content");
            ours.own.close(&mut bytes, 0);
            assert_eq!(
                theirs.other.open(&bytes, 100).unwrap(),
                Some((k, &b"content"[..], bytes.len()))
            );
            assert!(theirs.other.open(&bytes, 100).is_err(), "said again, it is another's");
            theirs.other.count -= 1;
        }
        let mut bytes = frame(0, b"content");
        theirs.own.close(&mut bytes, 0);
        assert!(theirs.other.open(&bytes, 100).is_err(), "sent back to where it came from");
        assert!(ours.other.open(&bytes, 6).is_err(), "longer than it may be");
        assert_eq!(ours.other.open(&bytes[..bytes.len() - 1], 100), Ok(None));
    }

    #[test]
    fn another_secret_version_or_verdict_is_refused() {
        let (called, caller, introduction) = greeted([8; SECRET_BYTES]);
        assert!(called.introduction(&introduction).unwrap().admit(&SECRET).is_none());
        assert!(matches!(caller.hear(&refusal()), Err(Denied::Refused)));
        let (called, caller, introduction) = greeted(SECRET);
        assert!(
            Called::new().unwrap().introduction(&introduction).unwrap().admit(&SECRET).is_none(),
            "of another connection"
        );
        let (mut verdict, _) = called.introduction(&introduction).unwrap().admit(&SECRET).unwrap();
        verdict[5] ^= 1;
        assert!(matches!(caller.hear(&verdict), Err(Denied::Impostor)));
        let mut old = called.greeting().to_vec();
        old[7] = 1;
        assert_eq!(
            Caller::new(SECRET, SERVICE, 3).unwrap().introduction(&old),
            Err(Denied::UnknownProtocol)
        );
    }

    proptest! {
        #[test]
        fn no_bit_of_a_knock_can_be_changed(at in 0..INTRODUCTION_BYTES * 8) {
            let (called, _, mut introduction) = greeted(SECRET);
            introduction[at / 8] ^= 1 << (at % 8);
            prop_assert!(called.introduction(&introduction).unwrap().admit(&SECRET).is_none());
        }
    }
}

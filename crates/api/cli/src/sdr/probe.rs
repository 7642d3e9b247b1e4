//! `unbroken sdr probe`: how much of plain UDP is lost on a way, after the paper's Figure 2.
//!
//! Datagrams of several payload sizes, by turns, at a bounded rate and for a bounded time; the far
//! end counts by trial and size, and is asked for its counts at the end of each trial, several
//! times, since what it says may be lost, too. A datagram that is not the probe's is dropped. What
//! the far end says is marked as an answer, which nobody answers, and is no longer than the
//! question: whoever forges an address gets one datagram sent there for each of his own, of its
//! length. The far end's socket has as large a buffer as it may have: what finds no room there,
//! since the far end has no core just then, would be taken for lost on the way.

use std::collections::VecDeque;
use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use clap::Args;
use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_recv_buffer_size_force};
use serde::Serialize;

use crate::output::{print, print_json, Failure, Result};
use unbroken_units::{read, show};

/// The longest probe, and the fastest.
const LONGEST: Duration = Duration::from_secs(3600);
const FASTEST_BPS: u64 = 1_000_000_000;
const MAGIC: [u8; 4] = *b"ubp2";
/// Magic, nonce, trial, kind.
const HEAD: usize = 4 + 8 + 4 + 1;
/// A head and a count, or as many zeros.
const QUESTION: usize = HEAD + 8;
const KEY: std::ops::Range<usize> = 4..16;
/// Trials that the far end counts at one time.
const MAX_COUNTS: usize = 64;
/// How often the counts of a trial are asked for, and how long an answer may take.
const QUESTIONS: u32 = 10;
const ANSWER: Duration = Duration::from_millis(200);
/// Room for what comes while the far end has no core: 30 ms of the fastest probe.
const BUFFER_BYTES: usize = 4 << 20;

#[derive(Args)]
pub(crate) struct ProbeArgs {
    /// The far end, which listens
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with = "listen")]
    to: Option<SocketAddr>,
    /// Be the far end
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// Payloads in bytes, with commas
    #[arg(long, default_value = "1024,2048,4096,8192", value_delimiter = ',', value_parser = payload)]
    payloads: Vec<u32>,
    /// Bits a second, at most 1G
    #[arg(long, default_value = "50M", value_parser = read::rate)]
    rate: u64,
    /// How long a trial takes
    #[arg(long, default_value = "1s", value_parser = crate::args::duration)]
    trial: Duration,
    /// Trials of each payload
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    trials: u32,
    /// How long the far end listens
    #[arg(long = "for", default_value = "10m", value_parser = crate::args::duration)]
    lasts: Duration,
    /// One JSON object a trial
    #[arg(long)]
    json: bool,
}

/// Bytes of a datagram.
fn payload(text: &str) -> std::result::Result<u32, String> {
    match read::size(text)? {
        bytes @ 64..=65_000 => Ok(bytes as u32),
        bytes => Err(format!("{bytes} bytes; 64 to 65000 are right")),
    }
}

/// A trial.
#[derive(Clone, Copy, Debug, Serialize)]
struct Trial {
    trial: u32,
    payload_bytes: u32,
    sent: u64,
    lost: u64,
    loss: f64,
}

fn io(what: &'static str) -> impl Fn(std::io::Error) -> Failure {
    move |e| Failure::io(what, e)
}

/// Runs the probe, or its far end.
pub(super) fn probe(args: &ProbeArgs) -> Result {
    let whole = args.trial.saturating_mul(args.trials).saturating_mul(args.payloads.len() as u32);
    if whole > LONGEST || args.lasts > LONGEST {
        return Err(Failure::Text(format!(
            "a probe of {whole:?}: an hour at most is right; fewer or shorter trials"
        )));
    }
    if args.rate > FASTEST_BPS {
        return Err(Failure::Text(
            "a probe takes a way from others: at most 1G is right for --rate".into(),
        ));
    }
    if let Some(address) = args.listen {
        let socket = UdpSocket::bind(address).map_err(io("cannot listen there"))?;
        return listen(&socket, Instant::now() + args.lasts);
    }
    match args.to {
        Some(to) => measure(args, to),
        None => {
            let socket =
                UdpSocket::bind("127.0.0.1:0").map_err(io("cannot listen on the loopback"))?;
            let to = socket.local_addr().map_err(io("cannot listen on the loopback"))?;
            let until = Instant::now() + whole + Duration::from_secs(60);
            std::thread::spawn(move || listen(&socket, until));
            measure(args, to)
        }
    }
}

/// What a datagram of the probe is. Who sees another is not meant.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Load = 0,
    Question = 1,
    Answer = 2,
}

fn head(nonce: u64, trial: u32, kind: Kind) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..4].copy_from_slice(&MAGIC);
    head[4..12].copy_from_slice(&nonce.to_be_bytes());
    head[12..16].copy_from_slice(&trial.to_be_bytes());
    head[16] = kind as u8;
    head
}

/// A head with a count behind it: a question has 0, so that it is as long as its answer.
fn counted(head: &[u8; HEAD], count: u64) -> [u8; QUESTION] {
    let mut datagram = [0; QUESTION];
    datagram[..HEAD].copy_from_slice(head);
    datagram[HEAD..].copy_from_slice(&count.to_be_bytes());
    datagram
}

/// A number that strangers cannot guess.
fn draw() -> Result<u64> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| Failure::io("draw a random number", e.into()))?;
    Ok(u64::from_ne_bytes(bytes))
}

/// How many datagrams of each trial have come; the trial that was heard of last is the last.
#[derive(Default)]
struct Counts(VecDeque<([u8; 12], u64)>);

impl Counts {
    /// The count of a trial; of too many the one that has been silent for longest is forgotten.
    fn of(&mut self, key: [u8; 12]) -> &mut u64 {
        let at = self.0.iter().position(|(other, _)| *other == key);
        let found = at.and_then(|at| self.0.remove(at));
        if found.is_none() && self.0.len() == MAX_COUNTS {
            self.0.pop_front();
        }
        self.0.push_back(found.unwrap_or((key, 0)));
        // It was put there just now.
        &mut self.0.back_mut().expect("one at least").1
    }
}

/// What the far end says to a datagram: to a question of its length, and to nothing else.
fn answer(counts: &mut Counts, datagram: &[u8]) -> Option<[u8; QUESTION]> {
    let head: &[u8; HEAD] = datagram.first_chunk()?;
    let key: [u8; 12] = head[KEY].try_into().ok()?;
    if head[..4] != MAGIC {
        return None;
    }
    if head[16] == Kind::Load as u8 {
        *counts.of(key) += 1;
    }
    if head[16] != Kind::Question as u8 || datagram.len() != QUESTION {
        return None;
    }
    let mut head = *head;
    head[16] = Kind::Answer as u8;
    Some(counted(&head, *counts.of(key)))
}

/// Counts the datagrams of trials.
fn listen(socket: &UdpSocket, until: Instant) -> Result {
    if set_socket_recv_buffer_size_force(socket, BUFFER_BYTES).is_err() {
        // As much of it as the system lets anybody have.
        set_socket_recv_buffer_size(socket, BUFFER_BYTES)
            .map_err(|e| Failure::io("no room for datagrams", e.into()))?;
    }
    let mut buffer = vec![0; 1 << 16];
    let mut counts = Counts::default();
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        socket.set_read_timeout(Some(left)).map_err(io("cannot wait"))?;
        let Ok((bytes, from)) = socket.recv_from(&mut buffer) else { continue };
        if let Some(answer) = answer(&mut counts, &buffer[..bytes]) {
            // A lost answer is asked for again.
            let _ = socket.send_to(&answer, from);
        }
    }
}

fn measure(args: &ProbeArgs, to: SocketAddr) -> Result {
    let own = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(own).map_err(io("no socket"))?;
    socket.connect(to).map_err(io("cannot reach the far end"))?;
    let nonce = draw()?;
    let mut trials = Vec::new();
    let mut number = 0;
    for trial in 0..args.trials {
        for payload in &args.payloads {
            let sent = send(&socket, args, *payload, &head(nonce, number, Kind::Load))?;
            let came = ask(&socket, nonce, number)?;
            let lost = sent.saturating_sub(came);
            let of = Trial {
                trial,
                payload_bytes: *payload,
                sent,
                lost,
                loss: lost as f64 / sent.max(1) as f64,
            };
            if args.json {
                print_json(&of)?;
            } else {
                print(&format!("trial {trial}, {payload} bytes: {lost} of {sent} lost\n"))?;
            }
            trials.push(of);
            number += 1;
        }
    }
    if args.json {
        return Ok(());
    }
    print(&summary(args, &trials))
}

/// Sends at the rate for the time of a trial; gives how many datagrams.
fn send(socket: &UdpSocket, args: &ProbeArgs, payload: u32, head: &[u8]) -> Result<u64> {
    let mut datagram = head.to_vec();
    datagram.resize(payload as usize, 0);
    let every = Duration::from_secs_f64(8.0 * f64::from(payload) / args.rate as f64);
    let began = Instant::now();
    let (mut sent, mut refused) = (0u64, 0u32);
    while began.elapsed() < args.trial {
        let due = began + every.mul_f64(sent as f64);
        if let Some(wait) = due.checked_duration_since(Instant::now()) {
            let left = args.trial.saturating_sub(began.elapsed());
            std::thread::sleep(wait.min(left));
            // The next one is due after the trial.
            if wait > left {
                break;
            }
        }
        match socket.send(&datagram) {
            Ok(_) => (sent, refused) = (sent + 1, 0),
            Err(e) if refused > 1000 => {
                return Err(Failure::io("the far end does not take datagrams", e))
            }
            Err(_) => {
                refused += 1;
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
    Ok(sent)
}

/// Asks how many have come.
fn ask(socket: &UdpSocket, nonce: u64, trial: u32) -> Result<u64> {
    let mut buffer = [0; QUESTION];
    let (question, answer) =
        (counted(&head(nonce, trial, Kind::Question), 0), head(nonce, trial, Kind::Answer));
    for _ in 0..QUESTIONS {
        // What is on its way comes before the question, or with the next one.
        let _ = socket.send(&question);
        let until = Instant::now() + ANSWER;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            socket.set_read_timeout(Some(left)).map_err(io("cannot wait"))?;
            match socket.recv(&mut buffer) {
                Ok(bytes) if bytes == QUESTION && buffer[..HEAD] == answer => {
                    let mut count = [0; 8];
                    count.copy_from_slice(&buffer[HEAD..]);
                    return Ok(u64::from_be_bytes(count));
                }
                // An answer to a question of an earlier trial, which came late, takes none of this
                // one's time.
                Ok(_) => {}
                Err(_) => break,
            }
        }
    }
    Err(Failure::Text(
        "the far end does not answer; start it there, of this version, with: unbroken sdr probe \
         --listen ADDRESS:PORT"
            .into(),
    ))
}

fn summary(args: &ProbeArgs, trials: &[Trial]) -> String {
    let mut text = String::from("\npayload   mean loss   least   most\n");
    for payload in &args.payloads {
        let of: Vec<f64> =
            trials.iter().filter(|t| t.payload_bytes == *payload).map(|t| t.loss).collect();
        let (least, most) = of
            .iter()
            .fold((1.0f64, 0.0f64), |(least, most), loss| (least.min(*loss), most.max(*loss)));
        let mean = of.iter().sum::<f64>() / of.len() as f64;
        let shown = [mean, least, most].map(show::probability);
        text += &format!("{payload:7}   {:9}   {:5}   {}\n", shown[0], shown[1], shown[2]);
    }
    let (sent, lost) = trials.iter().fold((0, 0), |(sent, lost), t| (sent + t.sent, lost + t.lost));
    // What has not been seen in so many is taken for half an event.
    let loss = show::probability((lost as f64).max(0.5) / sent.max(1) as f64);
    text + &format!(
        "\nnext: unbroken model --bandwidth {} --rtt … --loss {loss} --size …\n",
        show::with_prefix(args.rate as f64, 1e3)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers to questions of before that wait to be read are no answers, and do not take the
    /// place of one.
    #[test]
    fn late_answers_of_an_earlier_trial_are_passed_over() {
        let (far, near) =
            (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        near.connect(far.local_addr().unwrap()).unwrap();
        let answer = |trial, count| counted(&head(7, trial, Kind::Answer), count);
        for _ in 0..3 * QUESTIONS {
            far.send_to(&answer(1, 10), near.local_addr().unwrap()).unwrap();
        }
        let answers = std::thread::spawn(move || {
            let (bytes, from) = far.recv_from(&mut [0; 64]).unwrap();
            far.send_to(&answer(2, 20), from).unwrap();
            bytes
        });
        assert_eq!(ask(&near, 7, 2).unwrap(), 20);
        assert_eq!(answers.join().unwrap(), QUESTION);
    }

    #[test]
    fn the_far_end_counts_one_trial_at_a_time_and_ignores_what_is_none() {
        let far = UdpSocket::bind("127.0.0.1:0").unwrap();
        let near = UdpSocket::bind("127.0.0.1:0").unwrap();
        near.connect(far.local_addr().unwrap()).unwrap();
        std::thread::spawn(move || listen(&far, Instant::now() + Duration::from_secs(10)));
        for datagram in [&b"who are you, and what do you want?"[..], b"ubpr", &[]] {
            near.send(datagram).unwrap();
        }
        for trial in [1, 2] {
            for _ in 0..trial * 10 {
                near.send(&head(7, trial, Kind::Load)).unwrap();
            }
            assert_eq!(ask(&near, 7, trial).unwrap(), u64::from(trial) * 10);
        }
    }

    /// Two far ends that are made to hear each other, or one itself, fall silent at once.
    #[test]
    fn an_answer_is_never_answered_and_never_longer_than_its_question() {
        let mut counts = Counts::default();
        let question = counted(&head(7, 1, Kind::Question), 0);
        let said = answer(&mut counts, &question).unwrap();
        assert!(said.len() <= question.len());
        assert_eq!(answer(&mut counts, &said), None);
        for kind in 0..=u8::MAX {
            let mut forged = question;
            forged[16] = kind;
            assert_eq!(
                answer(&mut counts, &forged).is_some(),
                kind == Kind::Question as u8,
                "{kind}"
            );
        }
        for short in [&question[..HEAD], &question[..QUESTION - 1]] {
            assert_eq!(answer(&mut counts, short), None, "its answer would be longer");
        }
    }

    /// What others send takes nothing from the counts of a trial.
    #[test]
    fn strangers_do_not_spoil_a_trial() {
        let mut counts = Counts::default();
        for k in 0..1000 {
            answer(&mut counts, &head(7, 1, Kind::Load));
            answer(&mut counts, &head(k, 9, Kind::Load));
        }
        assert_eq!(*counts.of(head(7, 1, Kind::Load)[KEY].try_into().unwrap()), 1000);
        assert_eq!(counts.0.len(), MAX_COUNTS);
    }
}

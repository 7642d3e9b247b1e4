//! A cluster that starts at once, on one server: what it costs it, and how long that takes.
//!
//! Clients are threads of this program with a connection each, as those of processes are. On two
//! cores, which they share with the server, they are the bottleneck, and not the server.

use super::*;

const CLIENTS: u32 = 1000;
const QPS: u32 = 64;
/// However the machine is loaded; a tenth of it is what it takes on two idle cores.
const BOUND: Duration = Duration::from_secs(180);
/// What the server may need for a QP.
const MOST_BYTES: u64 = 1024;

fn host(client: u32) -> Gid {
    let [_, _, high, low] = (client % CLIENTS).to_be_bytes();
    Gid::from_ip([10, 1, high, low].into())
}

fn qpn(client: u32, n: u32) -> u32 {
    0x100 + (client % CLIENTS) * QPS + n
}

/// A thousand connections are more than a program may have by default.
fn raise_descriptors() {
    use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
    let limit = getrlimit(Resource::Nofile);
    let most = limit.maximum;
    setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most }).unwrap();
    let needed = u64::from(2 * CLIENTS);
    assert!(most.is_none_or(|most| most >= needed), "{needed} descriptors are needed: ulimit -Hn");
}

/// A number of `INFO`.
fn info(server: &Server, name: &str) -> u64 {
    let text = server.ask(&["info", "everything"]);
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name}:")));
    line.and_then(|value| value.trim().parse().ok()).unwrap_or_else(|| panic!("no {name}: {text}"))
}

/// What the server says that a key with its value takes: those of a QP, all as long. What it uses
/// in all says little, since the buffers of a thousand connections come and go.
fn bytes_of_a_qp(server: &Server) -> u64 {
    let keys = server.ask(&["--scan", "--pattern", "lab:*:qp:*"]);
    let key = keys.lines().next().expect("there are entries of QPs");
    server.ask(&["memory", "usage", key]).trim().parse().unwrap()
}

/// Waits for something about all clients, and gives how long that took.
fn all_of(
    clients: &[Redis],
    since: Instant,
    what: &str,
    is: impl Fn(u32, &Redis) -> bool,
) -> Duration {
    for (client, directory) in (0..).zip(clients) {
        while !is(client, directory) {
            let took = since.elapsed();
            assert!(took < BOUND, "{what}: client {client} not within {BOUND:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    since.elapsed()
}

/// Waits until the server has an entry for each QP, and gives how long that took.
fn all_are_there(server: &Server, qps: u64, since: Instant) -> Duration {
    let there = || server.ask(&["dbsize"]).trim().parse::<u64>().unwrap_or_default();
    while there() < qps + u64::from(CLIENTS) {
        assert!(since.elapsed() < BOUND, "{} entries of {qps} QPs within {BOUND:?}", there());
        std::thread::sleep(Duration::from_millis(20));
    }
    since.elapsed()
}

/// Each client asks for all QPs of the next one.
fn ask_all(clients: &[Redis]) {
    for (client, directory) in (0..).zip(clients) {
        let next = (client + 1) % CLIENTS;
        for n in 0..QPS {
            directory.ask_qp(host(next), qpn(next, n)).unwrap();
        }
    }
}

/// Whether a client has found all QPs of the next one.
fn knows_next(client: u32, directory: &Redis) -> bool {
    (0..QPS).all(|n| {
        let next = (client + 1) % CLIENTS;
        match directory.answer_qp(host(next), qpn(next, n)) {
            Ok(Found::Peer { qp, .. }) => qp.incarnation == u64::from(next) + 1,
            // It was asked for before it was entered.
            Ok(Found::Nobody) => directory.ask_qp(host(next), qpn(next, n)).is_err(),
            _ => false,
        }
    })
}

#[test]
fn a_thousand_clients_with_64_queue_pairs_each() {
    raise_descriptors();
    let Some(mut server) = Server::start("") else { return };
    let (url, begun) = (server.url("", ""), Instant::now());
    let clients: Vec<Redis> = (0..CLIENTS).map(|_| try_open(&url).unwrap().0).collect();
    let opened = all_of(&clients, begun, "the key", |_, directory| directory.key().is_some());
    let commands = info(&server, "total_commands_processed");

    let begun = Instant::now();
    for (client, directory) in (0..).zip(&clients) {
        let incarnation = u64::from(client) + 1;
        directory.publish_process(incarnation, &process(client)).unwrap();
        for n in 0..QPS {
            directory
                .publish_qp(host(client), qpn(client, n), QpEntry::new(incarnation, 1))
                .unwrap();
        }
    }
    let qps = u64::from(CLIENTS * QPS);
    let entered = all_are_there(&server, qps, begun);
    let each = bytes_of_a_qp(&server);

    let begun = Instant::now();
    ask_all(&clients);
    let found = all_of(&clients, begun, "answers", knows_next);
    let commands = info(&server, "total_commands_processed") - commands;
    let rate = commands as f64 / (entered + found).as_secs_f64();

    // It comes back without data: all is entered anew.
    server.kill();
    server.begin();
    let begun = Instant::now();
    let again = all_are_there(&server, qps, begun);
    // What was found before is forgotten. Who only looked for one answer after the other would ask
    // for one after the other.
    let begun = Instant::now();
    ask_all(&clients);
    let refound = all_of(&clients, begun, "answers after the loss", knows_next);
    println!(
        "{CLIENTS} clients of {QPS} QPs: connected in {opened:.1?}, entered in {entered:.1?}, \
         found in {found:.1?}, entered again in {again:.1?}, found again in {refound:.1?}; {each} \
         bytes of the server for a QP, {commands} commands, {rate:.0} a second"
    );
    assert!((1..=MOST_BYTES).contains(&each), "{each} bytes for a QP");
    // Each waits for its end, as a process does; a thousand processes do so side by side.
    std::thread::scope(|scope| {
        for some in clients.chunks(CLIENTS as usize / 100) {
            scope.spawn(|| some.iter().for_each(Directory::close));
        }
    });
}

//! The directory on a real Redis server, which each test starts for itself on a loopback address of
//! its own. Where there is no redis-server, the tests say so and pass.
//!
//! A test that needs another process starts this program again with a role.

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use unbroken_directory::{
    Directory, DirectoryError, Found, MovedQp, News, NicRecord, ProcessRecord, QpEntry, Redis,
    Settings, Surroundings,
};
use unbroken_types::Gid;

mod hostile;
mod scale;

const ROLE: &str = "REDIS_TEST_URL";
const PATIENCE: Duration = Duration::from_secs(20);
/// What docs/guide/failover.md says that the user needs.
const RIGHTS: &str = "~lab:* +@read +@write +@connection +time";

fn gid(n: u8) -> Gid {
    Gid::from_ip([10, 0, 1, n].into())
}

fn process(pid: u32) -> ProcessRecord {
    let nic = |index: u32| NicRecord {
        index,
        gid: gid(index as u8),
        address: gid(50 + index as u8),
        control_qpn: 9,
        key_set: 1,
        lid: 0,
        name: format!("a/{index}"),
        further_ports: vec![],
    };
    ProcessRecord { pid, nics: (0..2).map(nic).collect() }
}

fn moved(n: u8) -> MovedQp {
    MovedQp { known: (gid(n), 5), now: (gid(n + 1), 6), shown: gid(n) }
}

fn wait(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "{what}: not so far");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn try_open(url: &str) -> Result<(Redis, mpsc::Receiver<News>), DirectoryError> {
    let Settings::Redis(settings) = Settings::parse(url)? else { panic!("{url}") };
    let (sender, news) = mpsc::channel();
    let spawn = |name: &str, body: Box<dyn FnOnce() + Send>| {
        std::thread::Builder::new().name(name.into()).spawn(body).map(drop)
    };
    let news_to = move |news| match news {
        News::Answered(_) => {}
        news => drop(sender.send(news)),
    };
    let surroundings = Surroundings { spawn, news: Box::new(news_to) };
    Ok((Redis::open(&settings, surroundings)?, news))
}

fn open(url: &str) -> Redis {
    let (directory, _) = try_open(url).unwrap();
    wait("the server answers", || directory.key().is_some());
    directory
}

/// What a look-up gives as soon as there is an answer.
fn look_up(directory: &Redis, host: u8, qpn: u32) -> Result<Option<(u64, u32)>, DirectoryError> {
    let (mut found, start) = (directory.ask_qp(gid(host), qpn)?, Instant::now());
    while found == Found::Later {
        assert!(start.elapsed() < PATIENCE, "no answer about {qpn}");
        std::thread::sleep(Duration::from_millis(1));
        found = directory.answer_qp(gid(host), qpn)?;
    }
    Ok(match found {
        Found::Peer { qp, .. } => Some((qp.incarnation, qp.connection)),
        _ => None,
    })
}

/// A server of this test; `None` where there is no redis-server.
struct Server {
    addr: Ipv4Addr,
    port: u16,
    folder: tempfile::TempDir,
    options: Vec<String>,
    child: Option<Child>,
}

impl Server {
    fn start(options: &str) -> Option<Server> {
        static PORTS: AtomicU16 = AtomicU16::new(21_000);
        if Command::new("redis-server").arg("--version").stdout(Stdio::null()).status().is_err() {
            eprintln!("skipped: there is no redis-server (Debian package redis-server)");
            return None;
        }
        // An address that no other process has: this one's number.
        let [_, a, b, c] = std::process::id().to_be_bytes();
        let addr = Ipv4Addr::new(127, 100 + a, b, c);
        let options = options.split_whitespace().map(str::to_string).collect();
        let folder = tempfile::tempdir().unwrap();
        let port = PORTS.fetch_add(1, Ordering::Relaxed);
        let mut server = Server { addr, port, folder, options, child: None };
        server.begin();
        Some(server)
    }

    fn begin(&mut self) {
        let (addr, port) = (self.addr.to_string(), self.port.to_string());
        let mut command = Command::new("redis-server");
        if !self.options.iter().any(|o| o == "--tls-port") {
            command.args(["--port", &port]);
        }
        command.args(["--bind", &addr, "--save", "", "--protected-mode", "no", "--dir"]);
        command.arg(self.folder.path()).args(&self.options).stdout(Stdio::null());
        self.child = Some(command.spawn().unwrap());
        wait("redis-server listens", || {
            assert!(
                self.child.as_mut().unwrap().try_wait().unwrap().is_none(),
                "redis-server has ended"
            );
            TcpStream::connect((self.addr, self.port)).is_ok()
        });
    }

    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    fn url(&self, login: &str, more: &str) -> String {
        format!("redis://{login}{}:{}/?prefix=lab{more}", self.addr, self.port)
    }

    /// What the server answers to its administrator.
    fn ask(&self, words: &[&str]) -> String {
        let mut command = Command::new("redis-cli");
        command.args(["-h", &self.addr.to_string(), "-p", &self.port.to_string()]).args(words);
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Not a test by itself: what the other process does.
#[test]
fn other_process() {
    let Ok(url) = std::env::var(ROLE) else { return };
    let directory = open(&url);
    directory.publish_process(77, &process(std::process::id())).unwrap();
    directory.publish_qp(gid(7), 0x207, QpEntry::new(77, 4)).unwrap();
    directory.publish_moved(&[moved(7)]).unwrap();
    directory.settle(PATIENCE);
    println!("\nkey {:?} published", directory.key());
    std::io::stdout().flush().unwrap();
    // Until the parent closes the pipe.
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// Starts this program as another process, and waits until it has published; gives what it said.
fn start_other(url: &str) -> (Child, String) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "other_process", "--nocapture"])
        .env(ROLE, url)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let said =
        lines.map_while(Result::ok).find(|line| line.contains("published")).expect("it published");
    (child, said)
}

#[test]
fn processes_find_each_other_until_they_end() {
    let Some(server) = Server::start(&format!("--user default off --user me on >secret {RIGHTS}"))
    else {
        return;
    };
    let url = server.url("me:secret@", "");
    let (directory, news) = try_open(&url).unwrap();
    assert!(directory.moved().unwrap().is_empty());
    let (mut other, said) = start_other(&url);
    assert!(said.contains(&format!("{:?}", directory.key())), "{said}");
    assert_eq!(look_up(&directory, 7, 0x207).unwrap(), Some((77, 4)));
    assert_eq!(directory.lookup_process(77).unwrap(), Some(process(other.id())));
    assert_eq!(look_up(&directory, 7, 0x208).unwrap(), None);
    // It is told of moved QPs by itself.
    assert_eq!(news.recv_timeout(PATIENCE).unwrap(), News::Moved);
    assert_eq!(directory.moved().unwrap(), [moved(7)]);
    drop(other.stdin.take());
    assert!(other.wait().unwrap().success());
    wait("its end is known", || directory.lookup_process(77).unwrap().is_none());
    assert_eq!(look_up(&directory, 7, 0x207).unwrap(), None);
    assert_eq!(news.recv_timeout(PATIENCE).unwrap(), News::Moved);
    assert!(directory.moved().unwrap().is_empty());
}

#[test]
fn a_lease_ends_and_begins_again() {
    let Some(server) = Server::start("") else { return };
    let url = server.url("", "&lease=2");
    let directory = open(&url);
    let (mut other, _) = start_other(&url);
    let found = || look_up(&directory, 7, 0x207).unwrap().is_some();
    let since = Instant::now();
    while since.elapsed() < Duration::from_secs(5) {
        assert!(found(), "it renews its lease");
        std::thread::sleep(Duration::from_millis(50));
    }
    // SAFETY: a signal to our own child.
    let signal = |signal| assert_eq!(unsafe { libc::kill(other.id() as i32, signal) }, 0);
    signal(libc::SIGSTOP);
    assert!(found(), "a process that is stopped for a while is there");
    wait("its lease has ended", || !found());
    assert!(directory.lookup_process(77).unwrap().is_some(), "who knows it goes on knowing it");
    signal(libc::SIGCONT);
    wait("it is there again", found);
    other.kill().unwrap();
    other.wait().unwrap();
    wait("its lease has ended", || !found());
    // Nothing is left behind but the key and, for a while, the log of changes.
    let left = || server.ask(&["keys", "*"]).lines().filter(|name| !name.ends_with(":key")).count();
    wait("the rest has expired, too", || left() == 0);
}

#[test]
fn a_server_that_starts_anew_gets_everything_again() {
    let Some(mut server) = Server::start("") else { return };
    let url = server.url("", "");
    let (a, news) = try_open(&url).unwrap();
    let b = open(&url);
    a.publish_process(11, &process(1)).unwrap();
    a.publish_qp(gid(1), 5, QpEntry::new(11, 0)).unwrap();
    a.settle(PATIENCE);
    assert!(look_up(&b, 1, 5).unwrap().is_some());
    server.kill();
    let Ok(News::Lost(why)) = news.recv_timeout(PATIENCE) else { panic!("not told") };
    assert!(!why.is_empty());
    wait("the loss is noticed", || b.ask_qp(gid(1), 5).is_err());
    assert_eq!(
        b.lookup_process(11).unwrap(),
        Some(process(1)),
        "what is needed in a switch is kept"
    );
    a.publish_qp(gid(1), 6, QpEntry::new(11, 0)).unwrap();
    a.unpublish_qp(gid(1), 5).unwrap();
    server.begin();
    wait("it is back", || news.recv_timeout(PATIENCE).unwrap() == News::Back);
    let key = a.key();
    a.settle(PATIENCE);
    let found = |qpn| look_up(&b, 1, qpn);
    wait("what is published is there", || matches!(found(6), Ok(Some((11, 0)))));
    assert_eq!(found(5).unwrap(), None);
    assert_eq!((a.key(), b.key(), open(&url).key()), (key, key, key));
    // All is lost without a word.
    assert_eq!(server.ask(&["flushall"]).trim(), "OK");
    wait("it is there again", || matches!(found(6), Ok(Some((11, 0)))));
    assert_eq!(open(&url).key(), key);
}

/// It answers nothing more, and no connection breaks. However much was asked, that is noticed once
/// the first answer is late, and not after as long for each.
#[test]
fn a_server_that_falls_silent_is_given_up() {
    let Some(server) = Server::start("") else { return };
    let (directory, news) = try_open(&server.url("", "")).unwrap();
    wait("the server answers", || directory.key().is_some());
    let pid = server.child.as_ref().unwrap().id() as i32;
    // SAFETY: a signal to our own child.
    let signal = |signal| assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    signal(libc::SIGSTOP);
    directory.publish_process(11, &process(1)).unwrap();
    (0..500).for_each(|qpn| directory.publish_qp(gid(1), qpn, QpEntry::new(11, 0)).unwrap());
    let lost = news.recv_timeout(PATIENCE);
    signal(libc::SIGCONT);
    assert!(matches!(lost, Ok(News::Lost(_))), "{lost:?}");
    assert_eq!(news.recv_timeout(PATIENCE).unwrap(), News::Back);
    wait("all is entered", || {
        server.ask(&["keys", "lab:*:qp:*"]).lines().filter(|line| !line.is_empty()).count() == 500
    });
}

#[test]
fn what_is_wrong_is_said() {
    let Some(server) = Server::start(&format!(
        "--user default off --user me on >secret {RIGHTS} --user weak on >secret ~lab:* +@read"
    )) else {
        return;
    };
    let Some(open_server) = Server::start("") else { return };
    for (url, words) in [
        (server.url("me:wrong@", ""), ["refuses user and password", "UNBROKEN_DIRECTORY_PASSWORD"]),
        (server.url("", ""), ["wants a password", "UNBROKEN_DIRECTORY_PASSWORD"]),
        (server.url("weak:secret@", ""), ["does not allow", "+@write"]),
        (
            server.url("me:secret@", "").replace("=lab", "=elsewhere"),
            ["does not allow", "the prefix"],
        ),
        (open_server.url(":secret@", ""), ["refuses user and password", "or none"]),
        ("redis://127.0.0.1:1".into(), ["nobody listens", "refused"]),
    ] {
        let (directory, news) = try_open(&url).unwrap();
        let text = look_up(&directory, 1, 1).unwrap_err().to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{url}: {text}");
        assert!(!text.contains("secret") && !text.contains("wrong@"), "{text}");
        assert!(matches!(news.recv_timeout(PATIENCE), Ok(News::Unreachable(_))));
        assert!(directory.key().is_none());
    }
    let missing = try_open("rediss://127.0.0.1?ca=/nowhere.pem").err().unwrap().to_string();
    assert!(missing.contains("/nowhere.pem"), "{missing}");
}

/// A certificate authority and what it signs, as PEM files in the folder.
fn certificates(folder: &Path, addr: Ipv4Addr) {
    let run = |line: &str| {
        let done = Command::new("openssl")
            .args(line.split_whitespace())
            .current_dir(folder)
            .output()
            .expect("openssl");
        assert!(done.status.success(), "openssl {line}: {}", String::from_utf8_lossy(&done.stderr));
    };
    std::fs::write(folder.join("names"), format!("subjectAltName=IP:{addr}\n")).unwrap();
    for ca in ["ca", "other-ca"] {
        run(&format!(
            "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={ca} -keyout {ca}.key -out \
             {ca}.pem"
        ));
    }
    for name in ["server", "client"] {
        run(&format!(
            "req -newkey rsa:2048 -nodes -subj /CN={name} -keyout {name}.key -out {name}.csr"
        ));
        run(&format!(
            "x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile \
             names -out {name}.pem"
        ));
    }
}

#[test]
fn over_tls_both_ends_are_who_they_say() {
    if Command::new("openssl").arg("version").stdout(Stdio::null()).status().is_err() {
        eprintln!("skipped: there is no openssl (Debian package openssl)");
        return;
    }
    let Some(mut server) = Server::start("") else { return };
    server.kill();
    let folder = tempfile::tempdir().unwrap();
    certificates(folder.path(), server.addr);
    let file = |name: &str| folder.path().join(name).display().to_string();
    let (port, cert, key, ca) =
        (server.port.to_string(), file("server.pem"), file("server.key"), file("ca.pem"));
    let tls = [
        "--port",
        "0",
        "--tls-port",
        &port,
        "--tls-cert-file",
        &cert,
        "--tls-key-file",
        &key,
        "--tls-ca-cert-file",
        &ca,
    ];
    server.options = tls.map(String::from).to_vec();
    server.begin();
    let url = |more: &str| format!("rediss://{}:{}/?prefix=lab{more}", server.addr, server.port);
    let (own, own_key) = (file("client.pem"), file("client.key"));
    let (a, b) = (
        url(&format!("&ca={ca}&cert={own}&cert-key={own_key}")),
        url(&format!("&ca={}", file("other-ca.pem"))),
    );
    let directory = open(&a);
    directory.publish_process(11, &process(1)).unwrap();
    directory.publish_qp(gid(1), 5, QpEntry::new(11, 0)).unwrap();
    directory.settle(PATIENCE);
    let again = open(&a);
    assert_eq!(look_up(&again, 1, 5).unwrap(), Some((11, 0)));
    for (wrong, word) in [(b, "UnknownIssuer"), (url(&format!("&ca={ca}")), "ertificate")] {
        let (directory, _) = try_open(&wrong).unwrap();
        let text = look_up(&directory, 1, 5).unwrap_err().to_string();
        assert!(directory.key().is_none() && text.contains(word), "{text}");
    }
}

//! A server that answers without end, or with more than it was asked for: what of it is read, and
//! kept in memory, has a bound within an answer.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use unbroken_directory::{Directory, News};

use super::{gid, try_open, wait, PATIENCE};

/// What it does to one kind of command; to others it answers as it should.
#[derive(Clone, Copy)]
struct Hostile {
    command: &'static str,
    head: &'static str,
    /// Sent again and again.
    again: &'static str,
}

/// More than any answer may have: what is sent beyond is only refused by the connection's end.
const MUCH: u64 = 256 << 20;
/// The bound of an answer, and what lies in sockets.
const READ_AT_MOST: u64 = 96 << 20;

impl Hostile {
    /// Serves any number of connections; gives the port and how many bytes it got rid of, over the
    /// connection on which it sent most.
    fn start(self) -> (u16, Arc<AtomicU64>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let most = Arc::new(AtomicU64::new(0));
        let sent = most.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let sent = sent.clone();
                std::thread::spawn(move || drop(self.serve(stream, &sent)));
            }
        });
        (port, most)
    }

    fn serve(self, mut stream: TcpStream, sent: &AtomicU64) -> std::io::Result<()> {
        let mut input = BufReader::new(stream.try_clone()?);
        let mut values: HashMap<Vec<u8>, Vec<u8>> = HashMap::new();
        while let Some(words) = read_command(&mut input)? {
            if words[0] == self.command.as_bytes() {
                self.flood(&mut stream, sent)?;
                return Ok(());
            }
            let bulk = |bytes: &[u8]| {
                [format!("${}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat()
            };
            let answer = match &words[0][..] {
                b"SET" => {
                    values.entry(words[1].clone()).or_insert_with(|| words[2].clone());
                    b"+OK\r\n".to_vec()
                }
                b"GET" => values.get(&words[1]).map_or(b"$-1\r\n".to_vec(), |v| bulk(v)),
                b"TIME" => b"*2\r\n$1\r\n1\r\n$1\r\n1\r\n".to_vec(),
                b"HGETALL" | b"XRANGE" => b"*0\r\n".to_vec(),
                _ => b":1\r\n".to_vec(),
            };
            stream.write_all(&answer)?;
        }
        Ok(())
    }

    fn flood(self, stream: &mut TcpStream, sent: &AtomicU64) -> std::io::Result<()> {
        let many = self.again.repeat((1 << 16) / self.again.len());
        stream.write_all(self.head.as_bytes())?;
        let mut count = 0;
        while count < MUCH {
            stream.write_all(many.as_bytes())?;
            count += many.len() as u64;
            sent.fetch_max(count, Ordering::Relaxed);
        }
        Ok(())
    }
}

fn read_command(input: &mut impl BufRead) -> std::io::Result<Option<Vec<Vec<u8>>>> {
    let number = |input: &mut dyn BufRead| -> std::io::Result<Option<usize>> {
        let mut line = String::new();
        input.read_line(&mut line)?;
        Ok(line.trim_end().get(1..).and_then(|n| n.parse().ok()))
    };
    let Some(count) = number(input)? else { return Ok(None) };
    let mut words = Vec::new();
    for _ in 0..count {
        let Some(length) = number(input)? else { return Ok(None) };
        let mut word = vec![0; length + 2];
        input.read_exact(&mut word)?;
        word.truncate(length);
        words.push(word);
    }
    Ok(Some(words))
}

#[test]
fn an_answer_without_end_is_given_up_and_the_server_named() {
    for (command, head, again, words) in [
        ("GET", "*9000000000000000000\r\n", ":1\r\n", ["too long", "values at once"]),
        ("GET", "$1073741824\r\n", "x", ["too long", "64 MiB"]),
        ("GET", "", "*1\r\n", ["too long", "deep"]),
        ("TIME", "-ERR \x1b]0;pwned\x07", "A", ["too long", "a line"]),
        ("HGETALL", "*2000000000\r\n", "$4\r\nabcd\r\n", ["too long", "at once"]),
        (
            "XRANGE",
            "*5000\r\n",
            "*2\r\n$1\r\n1\r\n*2\r\n$1\r\np\r\n$1\r\nx\r\n",
            ["5000", "answers"],
        ),
        ("GET", "?\x1b]0;pwned\x07\r\n", "x", ["not Redis's protocol", "\\u{1b}"]),
    ] {
        let (port, sent) = Hostile { command, head, again }.start();
        let url = format!("redis://127.0.0.1:{port}");
        let (directory, news) = try_open(&url).unwrap();
        let why = || loop {
            match news.recv_timeout(PATIENCE).expect("the server is given up") {
                News::Lost(why) | News::Unreachable(why) => break why,
                _ => {}
            }
        };
        if command == "HGETALL" {
            wait("the server answers", || directory.key().is_some());
            directory.ask_qp(gid(1), 5).unwrap();
        }
        let why = why();
        assert!(words.iter().all(|word| why.contains(word)), "{command} {head}{again}: {why}");
        assert!(!why.contains(char::is_control), "{why:?}");
        let sent = sent.load(Ordering::Relaxed);
        assert!(sent <= READ_AT_MOST, "{command} {head}{again}: {sent} bytes were taken");
        let text = directory.ask_qp(gid(1), 6).unwrap_err().to_string();
        assert!(text.contains(&url), "{text}");
    }
}

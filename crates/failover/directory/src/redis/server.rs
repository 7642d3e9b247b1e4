//! The server that has the entries: how it is found among those of the settings, logged in to and
//! asked.
//!
//! Sentinels are asked at each connection where the master is. One that was a master refuses to
//! write (READONLY), and a node of a cluster that has the entries no more says where they are
//! (MOVED): both end the connection, and the next one leads to the right server.

use std::io;

use super::command::{Command, Connect, Names, Reply, Store, KEPT_LINES, MAX_LINES, TABLE};
use super::connection::{self, Commands, Connection, Tls, Waits};
use super::resp::{self, Error, Value};
use crate::error::{DirectoryError, Result};
use crate::servers::{Address, Servers};
use crate::settings::RedisSettings;

/// Nodes of a cluster that are asked for the owner of the entries, one named by the other.
const MOST_HOPS: usize = 5;

/// Connects to the server that has the entries, whichever of those of the settings that is now.
pub(super) struct Server {
    settings: RedisSettings,
    tls: Option<Tls>,
    waits: Waits,
    /// The one of the settings that has led there last: it is asked first.
    first: usize,
}

impl Server {
    /// Errors: a file that the settings name cannot be read, or is no PEM file.
    pub(super) fn new(settings: &RedisSettings) -> Result<Server> {
        let wrong = |why| DirectoryError::Setting(format!("directory {settings}: {why}"));
        let tls = settings.tls.then(|| connection::tls(settings)).transpose().map_err(wrong)?;
        Ok(Server { settings: settings.clone(), tls, waits: Waits::default(), first: 0 })
    }

    fn dial(&self, address: &Address, login: Login) -> resp::Result<Connection> {
        let mut connection = Connection::open(address, self.tls.as_ref(), self.waits)?;
        if let (Some(password), false) = (&self.settings.password, login == Login::None) {
            let mut words = vec![&b"AUTH"[..]];
            words.extend(self.settings.user.as_ref().map(|user| user.as_bytes()));
            words.push(password.as_bytes());
            connection.ask_one(&words).map_err(|e| match e {
                Error::Refused(_) => Error::Refused("WRONGPASS".into()),
                other => other,
            })?;
        }
        if login == Login::AsSet && self.settings.db != 0 {
            connection.ask_one(&[b"SELECT", self.settings.db.to_string().as_bytes()])?;
        }
        Ok(connection)
    }

    /// Where a sentinel says that the master is. It may have no password, or that of the master.
    fn master(&self, sentinel: &Address, name: &str) -> std::result::Result<Address, String> {
        let question: [&[u8]; 3] = [b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", name.as_bytes()];
        let ask = |login| self.dial(sentinel, login)?.ask_one(&question);
        let found = match ask(Login::None) {
            Err(Error::Refused(why)) if why.starts_with("NOAUTH") => ask(Login::Sentinel),
            found => found,
        };
        match found.map_err(|e| format!("sentinel {sentinel}: {}", self.explain(&e)))? {
            Value::Nil => Err(format!("sentinel {sentinel} knows no master '{name}'")),
            Value::Array(words) => address(words)
                .ok_or_else(|| format!("sentinel {sentinel}: the master's address is none")),
            other => Err(format!("sentinel {sentinel}: {}", unexpected(&other))),
        }
    }

    /// The node of a cluster that has the entries, beginning at one that may be another.
    fn owner(&self, node: &Address) -> std::result::Result<Connection, String> {
        let (mut at, key) = (node.clone(), Names::key(&self.settings.key_prefix()));
        for _ in 0..MOST_HOPS {
            let failed = |e: &Error| format!("node {at}: {}", self.explain(e));
            let mut connection = self.dial(&at, Login::AsSet).map_err(|e| failed(&e))?;
            match connection.ask_one(&[b"GET", key.as_bytes()]) {
                Ok(_) => return Ok(connection),
                Err(e) => at = moved_to(&e, &at).ok_or_else(|| failed(&e))?,
            }
        }
        Err(format!("node {node}: the nodes name one another as the owner of the entries"))
    }

    fn connect_by(&self, named: &Address) -> std::result::Result<Connection, String> {
        match &self.settings.servers {
            Servers::One(address) => self.dial(address, Login::AsSet).map_err(|e| self.explain(&e)),
            Servers::Sentinels { master, .. } => {
                let at = self.master(named, master)?;
                let said = |e| format!("master {at} (says {named}): {}", self.explain(&e));
                self.dial(&at, Login::AsSet).map_err(said)
            }
            Servers::Cluster(_) => self.owner(named),
        }
    }

    fn explain(&self, error: &Error) -> String {
        explain(error, self.waits)
    }
}

/// As whom to come to a server.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Login {
    /// As the settings say, for their database.
    AsSet,
    /// As they say, where there are no databases.
    Sentinel,
    /// As nobody.
    None,
}

/// Host and port, as a sentinel gives them.
fn address(words: Vec<Value>) -> Option<Address> {
    let [Value::Bytes(host), Value::Bytes(port)] = <[Value; 2]>::try_from(words).ok()? else {
        return None;
    };
    let port = std::str::from_utf8(&port).ok()?.parse().ok()?;
    let host = String::from_utf8(host).ok().filter(|h| !h.chars().any(char::is_control))?;
    Some(Address { host, port })
}

/// Where the entries are, if that is what the error says: `MOVED SLOT HOST:PORT`.
fn moved_to(error: &Error, from: &Address) -> Option<Address> {
    let Error::Refused(text) = error else { return None };
    let mut words = text.split(' ');
    if !matches!(words.next(), Some("MOVED" | "ASK")) {
        return None;
    }
    let (host, port) = words.nth(1)?.rsplit_once(':')?;
    let host = host.trim_matches(['[', ']']);
    let host = if host.is_empty() { &from.host } else { host };
    Some(Address { host: host.to_owned(), port: port.parse().ok()? })
}

impl Connect for Server {
    fn connect(&mut self) -> std::result::Result<Box<dyn Store>, String> {
        let count = self.settings.servers.named().len();
        let mut whys: Vec<String> = Vec::new();
        for at in (0..count).map(|k| (self.first + k) % count) {
            match self.connect_by(&self.settings.servers.named()[at]) {
                Ok(connection) => {
                    self.first = at;
                    return Ok(Box::new(LoggedIn { connection, waits: self.waits }));
                }
                Err(why) => whys.push(why),
            }
        }
        Err(whys.join("; "))
    }
}

/// A connection that serves the directory.
struct LoggedIn {
    connection: Connection,
    waits: Waits,
}

impl Store for LoggedIn {
    fn run(&mut self, commands: &[Command]) -> std::result::Result<Vec<Reply>, String> {
        let mut sent = Commands::default();
        commands.iter().for_each(|command| add(&mut sent, command));
        let values = self.connection.ask(&sent).map_err(|e| explain(&e, self.waits))?;
        let mut values = values.into_iter();
        commands.iter().map(|command| reply(command, &mut values)).collect()
    }
}

/// Adds a command in Redis's words: up to three.
fn add(to: &mut Commands, command: &Command) {
    let expire = |to: &mut Commands, name: &str, lease_ms: u64| {
        to.add(&[b"PEXPIRE", name.as_bytes(), lease_ms.to_string().as_bytes()]);
    };
    match command {
        Command::Time => to.add(&[b"TIME"]),
        Command::Claim { name, value } => to.add(&[b"SET", name.as_bytes(), value, b"NX"]),
        Command::Get(name) => to.add(&[b"GET", name.as_bytes()]),
        Command::Set { name, value, lease_ms } => {
            to.add(&[b"SET", name.as_bytes(), value, b"PX", lease_ms.to_string().as_bytes()]);
        }
        Command::SetSole { name, field, value, lease_ms } => {
            to.add(&[b"DEL", name.as_bytes()]);
            to.add(&[b"HSET", name.as_bytes(), field, value]);
            expire(to, name, *lease_ms);
        }
        Command::SetField { name, field, value, lease_ms } => {
            to.add(&[b"HSET", name.as_bytes(), field, value, TABLE, b""]);
            expire(to, name, *lease_ms);
        }
        Command::DeleteField { name, field } => to.add(&[b"HDEL", name.as_bytes(), field]),
        Command::Fields(name) => to.add(&[b"HGETALL", name.as_bytes()]),
        Command::Announce { name, line, lease_ms } => {
            let (name, kept) = (name.as_bytes(), KEPT_LINES.to_string());
            to.add(&[b"XADD", name, b"MAXLEN", b"~", kept.as_bytes(), b"*", b"p", line]);
            to.add(&[b"PEXPIRE", name, lease_ms.to_string().as_bytes()]);
        }
        Command::Since { name, id } => {
            let (from, most) = (format!("({id}"), MAX_LINES.to_string());
            let words = [from.as_bytes(), b"+", b"COUNT", most.as_bytes()];
            to.add(&[&[b"XRANGE", name.as_bytes()], &words[..]].concat());
        }
    }
}

/// The answer to a command, from the values that came for its words.
fn reply(
    command: &Command,
    values: &mut impl Iterator<Item = Value>,
) -> std::result::Result<Reply, String> {
    let mut value = || values.next().unwrap_or(Value::Nil);
    let first = value();
    let wrong = unexpected(&first);
    let reply = match command {
        Command::Time => time(first),
        Command::Claim { .. } => Some(Reply::Claimed(first != Value::Nil)),
        Command::Get(_) => match first {
            Value::Nil => Some(Reply::Value(None)),
            Value::Bytes(bytes) => Some(Reply::Value(Some(bytes))),
            _ => None,
        },
        Command::Fields(_) => fields(first).map(Reply::Fields),
        Command::Since { .. } => lines(first).map(Reply::Lines),
        Command::SetField { .. } | Command::Announce { .. } => {
            value();
            Some(Reply::Done)
        }
        Command::SetSole { .. } => {
            value();
            value();
            Some(Reply::Done)
        }
        Command::Set { .. } | Command::DeleteField { .. } => Some(Reply::Done),
    };
    reply.ok_or(wrong)
}

fn time(value: Value) -> Option<Reply> {
    let Value::Array(words) = value else { return None };
    let number = |value: &Value| match value {
        Value::Bytes(bytes) => std::str::from_utf8(bytes).ok()?.parse::<u64>().ok(),
        _ => None,
    };
    let [seconds, us] = words.as_slice() else { return None };
    Some(Reply::Time(number(seconds)?.saturating_mul(1000).saturating_add(number(us)? / 1000)))
}

fn fields(value: Value) -> Option<Vec<(Vec<u8>, Vec<u8>)>> {
    let Value::Array(values) = value else { return None };
    let (mut fields, mut values) = (Vec::with_capacity(values.len() / 2), values.into_iter());
    while let Some(name) = values.next() {
        let (Value::Bytes(name), Some(Value::Bytes(value))) = (name, values.next()) else {
            return None;
        };
        fields.push((name, value));
    }
    Some(fields)
}

/// Lines of a log: each has an id and a list of names and values, of which there is one. The server
/// gives no more than it was asked for.
fn lines(value: Value) -> Option<Vec<(String, Vec<u8>)>> {
    let Value::Array(lines) = value else { return None };
    let line = |line| {
        let Value::Array(parts) = line else { return None };
        let [Value::Bytes(id), Value::Array(pair)] = <[Value; 2]>::try_from(parts).ok()? else {
            return None;
        };
        let what = match pair.into_iter().nth(1) {
            Some(Value::Bytes(what)) => what,
            _ => Vec::new(),
        };
        Some((String::from_utf8(id).ok()?, what))
    };
    (lines.len() <= MAX_LINES).then(|| lines.into_iter().map(line).collect()).flatten()
}

/// What kind of answer came where another was asked for.
fn unexpected(value: &Value) -> String {
    let what = match value {
        Value::Nil => "nothing".into(),
        Value::Integer(n) => format!("the number {n}"),
        Value::Status(text) => format!("'{text}'"),
        Value::Bytes(bytes) => format!("{} bytes", bytes.len()),
        Value::Array(values) => format!("an array of {}", values.len()),
    };
    format!("the server answers {what} where that is no answer; is it a Redis server?")
}

/// An error in words: what is wrong, and what would be right.
fn explain(error: &Error, waits: Waits) -> String {
    const PASSWORD: &str = "UNBROKEN_DIRECTORY_PASSWORD_FILE or UNBROKEN_DIRECTORY_PASSWORD";
    match error {
        Error::Refused(text) => match text.split(' ').next().unwrap_or_default() {
            "WRONGPASS" => format!(
                "the server refuses user and password; give the right ones ({PASSWORD}), or none \
                 where it has none"
            ),
            "NOAUTH" => format!("the server wants a password; give it in {PASSWORD}"),
            "NOPERM" => format!(
                "the server does not allow this user what is needed (all keys with the prefix, \
                 +@read +@write +@stream +@connection): {text}"
            ),
            _ => format!("the server refuses: {text}"),
        },
        Error::TooLong(_) | Error::Malformed(_) => {
            format!("the server is not to be trusted, or is no Redis server: {error}")
        }
        Error::Io(error) => match error.kind() {
            // A read that has waited for its time; Linux says WouldBlock.
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => format!(
                "no answer within {} s, or not all of it within {} s",
                waits.piece.as_secs_f64(),
                waits.round.as_secs_f64()
            ),
            io::ErrorKind::ConnectionRefused => "nobody listens there (connection refused)".into(),
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted => "the server has closed the connection".into(),
            _ => error.to_string(),
        },
    }
}

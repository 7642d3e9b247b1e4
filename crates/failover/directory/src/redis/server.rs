//! The connection to a Redis server, by the crate `redis`. Every wait for it ends.
//!
//! Sentinels are asked at each connection where the master is. One that was a master refuses to
//! write (READONLY), and a node of a cluster that has the entries no more says where they are
//! (MOVED): both end the connection, and the next one leads to the right server.

use std::io;
use std::time::{Duration, Instant};

use ::redis::io::tcp::TcpSettings;
use ::redis::{
    Client, ClientTlsConfig, Cmd, Connection, ConnectionAddr, ErrorKind, FromRedisValue,
    IntoConnectionInfo, Pipeline, RedisConnectionInfo, RedisError, ServerErrorKind,
    TlsCertificates, Value,
};

use super::command::{Command, Connect, Names, Reply, Store, KEPT_LINES, MAX_LINES, TABLE};
use crate::error::{DirectoryError, Result};
use crate::servers::{Address, Servers};
use crate::settings::RedisSettings;

/// The server must answer within this time, else the connection is given up. Nobody waits for it
/// but the directory's thread; so it is longer than any network's round trip.
const IO_WAIT: Duration = Duration::from_secs(5);
/// All answers of a round must be there within this time.
const ROUND_WAIT: Duration = Duration::from_secs(30);
/// Nodes of a cluster that are asked for the owner of the entries, one named by the other.
const MOST_HOPS: usize = 5;

/// Connects to the server that has the entries, whichever of those of the settings that is now.
pub(super) struct Server {
    settings: RedisSettings,
    certificates: Option<TlsCertificates>,
    /// The one of the settings that has led there last: it is asked first.
    first: usize,
}

impl Server {
    /// Errors: a file that the settings name cannot be read, or is no PEM file.
    pub(super) fn new(settings: &RedisSettings) -> Result<Server> {
        let certificates = settings.tls.then(|| certificates(settings)).transpose()?;
        let server = Server { settings: settings.clone(), certificates, first: 0 };
        let wrong = |e: RedisError| DirectoryError::Setting(format!("directory {settings}: {e}"));
        settings.servers.named().iter().try_for_each(|address| {
            server.client(address, Login::AsSet).map(drop).map_err(wrong)
        })?;
        Ok(server)
    }

    fn client(&self, address: &Address, login: Login) -> std::result::Result<Client, RedisError> {
        let (settings, Address { host, port }) = (&self.settings, address.clone());
        let addr = match settings.tls {
            true => ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None },
            false => ConnectionAddr::Tcp(host, port),
        };
        // Names of clients are for people, and one more thing that an access list may refuse.
        let mut own = RedisConnectionInfo::default().set_skip_set_lib_name();
        if login == Login::AsSet {
            own = own.set_db(settings.db);
        }
        if login != Login::None {
            if let Some(user) = &settings.user {
                own = own.set_username(user);
            }
            if let Some(password) = &settings.password {
                own = own.set_password(password);
            }
        }
        let info = addr
            .into_connection_info()?
            .set_redis_settings(own)
            .set_tcp_settings(TcpSettings::default().set_nodelay(true));
        match &self.certificates {
            Some(certificates) => Client::build_with_tls(info, certificates.clone()),
            None => Client::open(info),
        }
    }

    fn dial(&self, address: &Address, login: Login) -> std::result::Result<Connection, RedisError> {
        let connection = self.client(address, login)?.get_connection_with_timeout(IO_WAIT)?;
        connection.set_read_timeout(Some(IO_WAIT))?;
        connection.set_write_timeout(Some(IO_WAIT))?;
        Ok(connection)
    }

    /// Where a sentinel says that the master is. It may have no password, or that of the master.
    fn master(&self, sentinel: &Address, name: &str) -> std::result::Result<Address, String> {
        let ask = |login| {
            let mut connection = self.dial(sentinel, login)?;
            let question = ::redis::cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(name).take();
            question.query::<Option<(String, u16)>>(&mut connection)
        };
        let found = match ask(Login::None) {
            Err(e) if e.to_string().contains("NOAUTH") => ask(Login::Sentinel),
            found => found,
        };
        match found {
            Ok(Some((host, port))) => Ok(Address { host, port }),
            Ok(None) => Err(format!("sentinel {sentinel} knows no master '{name}'")),
            Err(e) => Err(format!("sentinel {sentinel}: {}", explain(&e))),
        }
    }

    /// The node of a cluster that has the entries, beginning at one that may be another.
    fn owner(&self, node: &Address) -> std::result::Result<Connection, String> {
        let (mut at, key) = (node.clone(), Names::key(&self.settings.key_prefix()));
        for _ in 0..MOST_HOPS {
            let failed = |e: &RedisError| format!("node {at}: {}", explain(e));
            let mut connection = self.dial(&at, Login::AsSet).map_err(|e| failed(&e))?;
            let answer = ::redis::cmd("GET").arg(&key).query::<Value>(&mut connection);
            match answer {
                Ok(_) => return Ok(connection),
                Err(e) => at = moved_to(&e, &at).ok_or_else(|| failed(&e))?,
            }
        }
        Err(format!("node {node}: the nodes name one another as the owner of the entries"))
    }

    fn connect_by(&self, named: &Address) -> std::result::Result<Connection, String> {
        match &self.settings.servers {
            Servers::One(address) => self.dial(address, Login::AsSet).map_err(|e| explain(&e)),
            Servers::Sentinels { master, .. } => {
                let at = self.master(named, master)?;
                let said = |e| format!("master {at} (says {named}): {}", explain(&e));
                self.dial(&at, Login::AsSet).map_err(said)
            }
            Servers::Cluster(_) => self.owner(named),
        }
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

/// Where the entries are, if that is what the error says.
fn moved_to(error: &RedisError, from: &Address) -> Option<Address> {
    let (host, port) = error.redirect_node()?.0.rsplit_once(':')?;
    let host = host.trim_matches(['[', ']']);
    let host = if host.is_empty() { &from.host } else { host };
    Some(Address { host: host.to_owned(), port: port.parse().ok()? })
}

fn certificates(settings: &RedisSettings) -> Result<TlsCertificates> {
    let read = |path: &std::path::PathBuf| {
        let failed = |e| {
            DirectoryError::Setting(format!(
                "directory {settings}: cannot read {}: {e}",
                path.display()
            ))
        };
        std::fs::read(path).map_err(failed)
    };
    let client_tls = match &settings.cert {
        Some((cert, key)) => {
            Some(ClientTlsConfig { client_cert: read(cert)?, client_key: read(key)? })
        }
        None => None,
    };
    Ok(TlsCertificates { client_tls, root_cert: settings.ca.as_ref().map(read).transpose()? })
}

impl Connect for Server {
    fn connect(&mut self) -> std::result::Result<Box<dyn Store>, String> {
        let count = self.settings.servers.named().len();
        let mut whys: Vec<String> = Vec::new();
        for at in (0..count).map(|k| (self.first + k) % count) {
            match self.connect_by(&self.settings.servers.named()[at]) {
                Ok(connection) => {
                    self.first = at;
                    return Ok(Box::new(connection));
                }
                Err(why) => whys.push(why),
            }
        }
        Err(whys.join("; "))
    }
}

/// Sends a pipeline and takes the answers. (`Pipeline::query` waits for every one of them, also
/// when the first has not come in time: for a thousand it would wait hours for a server that is
/// silent.)
fn exchange(
    connection: &mut Connection,
    pipeline: &Pipeline,
) -> std::result::Result<Vec<Value>, RedisError> {
    let began = Instant::now();
    connection.send_packed_command(&pipeline.get_packed_pipeline())?;
    let mut values = Vec::with_capacity(pipeline.len());
    while values.len() < pipeline.len() {
        if began.elapsed() > ROUND_WAIT {
            return Err(io::Error::from(io::ErrorKind::TimedOut).into());
        }
        values.push(connection.recv_response()?.extract_error()?);
    }
    Ok(values)
}

impl Store for Connection {
    fn run(&mut self, commands: &[Command]) -> std::result::Result<Vec<Reply>, String> {
        let mut pipeline = Pipeline::with_capacity(3 * commands.len());
        for command in commands {
            words(command).into_iter().for_each(|cmd| {
                pipeline.add_command(cmd);
            });
        }
        let values = exchange(self, &pipeline).map_err(|e| explain(&e))?;
        let mut values = values.into_iter();
        commands
            .iter()
            .map(|command| reply(command, &mut values).map_err(|e| explain(&e)))
            .collect()
    }
}

/// A command in Redis's words: up to three.
fn words(command: &Command) -> Vec<Cmd> {
    let cmd = |word: &str, name: &str| {
        let mut cmd = ::redis::cmd(word);
        cmd.arg(name);
        cmd
    };
    let expire = |name: &str, lease_ms: u64| cmd("PEXPIRE", name).arg(lease_ms).take();
    match command {
        Command::Time => vec![::redis::cmd("TIME")],
        Command::Claim { name, value } => vec![cmd("SET", name).arg(value).arg("NX").take()],
        Command::Get(name) => vec![cmd("GET", name)],
        Command::Set { name, value, lease_ms } => {
            vec![cmd("SET", name).arg(value).arg("PX").arg(*lease_ms).take()]
        }
        Command::SetSole { name, field, value, lease_ms } => vec![
            cmd("DEL", name),
            cmd("HSET", name).arg(field).arg(value).take(),
            expire(name, *lease_ms),
        ],
        Command::SetField { name, field, value, lease_ms } => {
            let set = cmd("HSET", name).arg(field).arg(value).arg(TABLE).arg("").take();
            vec![set, expire(name, *lease_ms)]
        }
        Command::DeleteField { name, field } => vec![cmd("HDEL", name).arg(field).take()],
        Command::Fields(name) => vec![cmd("HGETALL", name)],
        Command::Announce { name, line, lease_ms } => {
            let add = cmd("XADD", name)
                .arg("MAXLEN")
                .arg("~")
                .arg(KEPT_LINES)
                .arg("*")
                .arg("p")
                .arg(line)
                .take();
            vec![add, expire(name, *lease_ms)]
        }
        Command::Since { name, id } => {
            vec![cmd("XRANGE", name)
                .arg(format!("({id}"))
                .arg("+")
                .arg("COUNT")
                .arg(MAX_LINES)
                .take()]
        }
    }
}

/// The answer to a command, from the values that came for its words.
fn reply(
    command: &Command,
    values: &mut impl Iterator<Item = Value>,
) -> std::result::Result<Reply, RedisError> {
    let mut value = || values.next().unwrap_or_default();
    let first = value();
    Ok(match command {
        Command::Time => {
            let (seconds, us): (u64, u64) = FromRedisValue::from_redis_value(first)?;
            Reply::Time(seconds.saturating_mul(1000).saturating_add(us / 1000))
        }
        Command::Claim { .. } => Reply::Claimed(first != Value::Nil),
        Command::Get(_) => Reply::Value(FromRedisValue::from_redis_value(first)?),
        Command::Fields(_) => Reply::Fields(FromRedisValue::from_redis_value(first)?),
        Command::Since { .. } => {
            let lines: Vec<(String, Vec<Vec<u8>>)> = FromRedisValue::from_redis_value(first)?;
            // A line is a list of names and values, of which there is one.
            let line =
                |(id, mut pair): (String, Vec<Vec<u8>>)| (id, pair.pop().unwrap_or_default());
            Reply::Lines(lines.into_iter().map(line).collect())
        }
        Command::SetField { .. } | Command::Announce { .. } => {
            value();
            Reply::Done
        }
        Command::SetSole { .. } => {
            value();
            value();
            Reply::Done
        }
        Command::Set { .. } | Command::DeleteField { .. } => Reply::Done,
    })
}

/// An error in words: what is wrong, and what would be right.
fn explain(error: &RedisError) -> String {
    const PASSWORD: &str = "UNBROKEN_DIRECTORY_PASSWORD_FILE or UNBROKEN_DIRECTORY_PASSWORD";
    let text = error.to_string();
    if error.kind() == ErrorKind::AuthenticationFailed || text.contains("WRONGPASS") {
        return format!(
            "the server refuses user and password; give the right ones ({PASSWORD}), or none where \
             it has none"
        );
    }
    if text.contains("NOAUTH") {
        return format!("the server wants a password; give it in {PASSWORD}");
    }
    match error.kind() {
        ErrorKind::Server(ServerErrorKind::NoPerm) => {
            format!(
                "the server does not allow this user what is needed (all keys with the prefix, \
                 +@read +@write +@stream +@connection): {text}"
            )
        }
        _ if error.is_timeout() => format!("no answer within {} s", IO_WAIT.as_secs()),
        _ if error.is_connection_refusal() => "nobody listens there (connection refused)".into(),
        _ if error.is_connection_dropped() => "the server has closed the connection".into(),
        ErrorKind::Io => {
            match std::error::Error::source(error).and_then(|e| e.downcast_ref::<io::Error>()) {
                Some(source) => source.to_string(),
                None => text,
            }
        }
        _ => text,
    }
}

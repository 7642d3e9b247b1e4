//! The connection to a Redis server, by the crate `redis`. Every wait for it ends.

use std::io;
use std::time::Duration;

use ::redis::io::tcp::TcpSettings;
use ::redis::{
    Client, ClientTlsConfig, Cmd, Connection, ConnectionAddr, ErrorKind, FromRedisValue,
    IntoConnectionInfo, Pipeline, RedisConnectionInfo, RedisError, ServerErrorKind,
    TlsCertificates, Value,
};

use super::command::{Command, Connect, Reply, Store, KEPT_LINES, MAX_LINES};
use crate::error::{DirectoryError, Result};
use crate::settings::RedisSettings;

/// The server must answer within this time, else the connection is given up.
const IO_WAIT: Duration = Duration::from_secs(1);

/// Connects to a server.
pub(super) struct Server(Client);

impl Server {
    /// Errors: a file that the settings name cannot be read, or is no PEM file.
    pub(super) fn new(settings: &RedisSettings) -> Result<Server> {
        let wrong = |e: RedisError| DirectoryError::Setting(format!("directory {settings}: {e}"));
        let (host, port) = (settings.host.clone(), settings.port);
        let addr = match settings.tls {
            true => ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None },
            false => ConnectionAddr::Tcp(host, port),
        };
        // Names of clients are for people, and one more thing that an access list may refuse.
        let mut login = RedisConnectionInfo::default().set_db(settings.db).set_skip_set_lib_name();
        if let Some(user) = &settings.user {
            login = login.set_username(user);
        }
        if let Some(password) = &settings.password {
            login = login.set_password(password);
        }
        let info = addr.into_connection_info().map_err(wrong)?;
        let info = info
            .set_redis_settings(login)
            .set_tcp_settings(TcpSettings::default().set_nodelay(true));
        let client = match settings.tls {
            true => Client::build_with_tls(info, certificates(settings)?),
            false => Client::open(info),
        };
        client.map(Server).map_err(wrong)
    }
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
        let connection = self.0.get_connection_with_timeout(IO_WAIT).map_err(|e| explain(&e))?;
        connection.set_read_timeout(Some(IO_WAIT)).map_err(|e| explain(&e))?;
        connection.set_write_timeout(Some(IO_WAIT)).map_err(|e| explain(&e))?;
        Ok(Box::new(connection))
    }
}

impl Store for Connection {
    fn run(&mut self, commands: &[Command]) -> std::result::Result<Vec<Reply>, String> {
        let mut pipeline = Pipeline::with_capacity(2 * commands.len());
        for command in commands {
            words(command).into_iter().for_each(|cmd| {
                pipeline.add_command(cmd);
            });
        }
        let values: Vec<Value> = pipeline.query(self).map_err(|e| explain(&e))?;
        let mut values = values.into_iter();
        commands
            .iter()
            .map(|command| reply(command, &mut values).map_err(|e| explain(&e)))
            .collect()
    }
}

/// A command in Redis's words: one or two.
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
        Command::Delete(name) => vec![cmd("DEL", name)],
        Command::SetField { name, field, value, lease_ms } => {
            vec![cmd("HSET", name).arg(field).arg(value).take(), expire(name, *lease_ms)]
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
        Command::Set { .. } | Command::Delete(_) | Command::DeleteField { .. } => Reply::Done,
    })
}

/// An error in words: what is wrong, and what would be right.
fn explain(error: &RedisError) -> String {
    const PASSWORD: &str = "UNBROKEN_DIRECTORY_PASSWORD_FILE or UNBROKEN_DIRECTORY_PASSWORD";
    let text = error.to_string();
    if error.kind() == ErrorKind::AuthenticationFailed || text.contains("WRONGPASS") {
        return format!(
            "the server refuses user and password; give the right ones ({PASSWORD}), or none where it has none"
        );
    }
    if text.contains("NOAUTH") {
        return format!("the server wants a password; give it in {PASSWORD}");
    }
    match error.kind() {
        ErrorKind::Server(ServerErrorKind::NoPerm) => {
            format!("the server does not allow this user what is needed (all keys with the prefix, +@read +@write +@stream +@connection): {text}")
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

//! Which directory: `UNBROKEN_DIRECTORY`.
//!
//! ```text
//! lmdb                                       the embedded one, in the runtime folder (also: not set, or empty)
//! redis://[user[:password]@]host[:port][/db][?setting=value&…]
//! redis+sentinel://[user[:password]@]host[:port],…/master[/db][?…]   the master of sentinels
//! redis+cluster://[user[:password]@]host[:port],…[?…]                a cluster
//! rediss://…                                 the same over TLS; rediss+sentinel, rediss+cluster
//! ```
//!
//! The settings are `prefix` (of all keys: one for each cluster), `lease` (seconds), `ca`, `cert`
//! and `cert-key` (PEM files: who signs the server's certificate, where that is not an authority of
//! the system's; this client's certificate). The password is best given in
//! `UNBROKEN_DIRECTORY_PASSWORD_FILE` or `UNBROKEN_DIRECTORY_PASSWORD`; it is never shown.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use percent_encoding::percent_decode_str;
use url::Url;

use crate::error::{DirectoryError, Result};
use crate::servers::{self, Servers};

/// The environment variable that names the directory.
pub const DEFAULT_VARIABLE: &str = "UNBROKEN_DIRECTORY";
/// The environment variable with the password of the directory.
pub const PASSWORD_VARIABLE: &str = "UNBROKEN_DIRECTORY_PASSWORD";
/// The environment variable that names a file with the password of the directory.
pub const PASSWORD_FILE_VARIABLE: &str = "UNBROKEN_DIRECTORY_PASSWORD_FILE";

pub(crate) const RIGHT: &str =
    "'lmdb', redis://[USER@]HOST[:PORT][/DB][?prefix=NAME&lease=SECONDS], \
     redis+sentinel://HOST,…/MASTER, redis+cluster://HOST,… or rediss… (TLS) is right";
const DEFAULT_PREFIX: &str = "unbroken";
const DEFAULT_LEASE_S: u64 = 60;
const LEASE_S: std::ops::RangeInclusive<u64> = 2..=86_400;
const MAX_PREFIX: usize = 128;

/// Which directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Settings {
    /// The embedded one.
    Lmdb,
    /// On a Redis server.
    Redis(Box<RedisSettings>),
}

/// Redis servers and how to use them. It is shown as its URL, without the password.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisSettings {
    /// Where they are.
    pub servers: Servers,
    /// Whether to use TLS.
    pub tls: bool,
    /// The number of the database.
    pub db: i64,
    /// The user; none is Redis's default user.
    pub user: Option<String>,
    /// The password.
    pub password: Option<String>,
    /// What the names of all keys begin with.
    pub prefix: String,
    /// For so long an entry stays that is not renewed. Longer than a process may be stopped.
    pub lease: Duration,
    /// PEM file: who signs the server's certificate.
    pub ca: Option<PathBuf>,
    /// PEM files: this client's certificate and its key.
    pub cert: Option<(PathBuf, PathBuf)>,
}

impl fmt::Display for RedisSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, user) =
            (if self.tls { "rediss" } else { "redis" }, self.user.as_deref().unwrap_or_default());
        let (at, db) = (if user.is_empty() { "" } else { "@" }, self.db);
        let named: Vec<String> = self.servers.named().iter().map(ToString::to_string).collect();
        let (suffix, named) = (self.servers.suffix(), named.join(","));
        let master = match &self.servers {
            Servers::Sentinels { master, .. } => format!("/{master}"),
            _ => String::new(),
        };
        write!(f, "{scheme}{suffix}://{user}{at}{named}{master}/{db}?prefix={}", self.prefix)
    }
}

impl fmt::Debug for RedisSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl Settings {
    /// From the environment.
    pub fn from_env() -> Result<Settings> {
        let text = std::env::var_os(DEFAULT_VARIABLE).unwrap_or_default();
        let text = text.to_str().ok_or_else(|| wrong("is not UTF-8", RIGHT))?;
        Settings::parse(text)
    }

    /// From a URL; a password that it lacks comes from the environment.
    pub fn parse(text: &str) -> Result<Settings> {
        Settings::parse_with(text, |name| {
            std::env::var(name).ok().filter(|value| !value.is_empty())
        })
    }

    /// From a URL of the command line, where everybody can see it: a password in it is an error.
    pub fn parse_public(text: &str) -> Result<Settings> {
        if servers::split(text).is_ok_and(|(_, url)| url.password().is_some()) {
            return Err(DirectoryError::Setting(format!(
                "directory: everybody can see a password on the command line; give it in \
                 {PASSWORD_FILE_VARIABLE} (the name of a file) or in {PASSWORD_VARIABLE}"
            )));
        }
        Settings::parse(text)
    }

    /// As [`Settings::parse_public`], with the password in that file, if one is named.
    pub fn parse_named(text: &str, password_file: Option<&Path>) -> Result<Settings> {
        let Some(file) = password_file else { return Settings::parse_public(text) };
        let file = file.to_str().ok_or_else(|| wrong("password file: is not UTF-8", RIGHT))?;
        if servers::split(text).is_ok_and(|(_, url)| url.password().is_some()) {
            return Settings::parse_public(text);
        }
        Settings::parse_with(text, |name| (name == PASSWORD_FILE_VARIABLE).then(|| file.into()))
    }

    fn parse_with(text: &str, env: impl Fn(&str) -> Option<String>) -> Result<Settings> {
        if matches!(text, "" | "lmdb") {
            return Ok(Settings::Lmdb);
        }
        // What is wrong is told without the text, which may have a password in it.
        let (servers, url) = servers::split(text)?;
        let tls = match url.scheme() {
            "redis" => false,
            "rediss" => true,
            other => return Err(wrong(&format!("begins with '{other}:'"), RIGHT)),
        };
        let path = url.path().trim_matches('/');
        let db = if path.is_empty() { Some(0) } else { path.parse::<u16>().ok() };
        let db = db.ok_or_else(|| {
            wrong(&format!("names the database '{path}'"), "a number is right: redis://HOST/0")
        })?;
        if db != 0 && matches!(servers, Servers::Cluster(_)) {
            return Err(wrong(&format!("names the database {db}"), "a cluster has 0 alone"));
        }
        let password = url.password().map(|p| decode(p, "password")).transpose()?;
        let mut settings = RedisSettings {
            servers,
            tls,
            db: db.into(),
            user: Some(decode(url.username(), "user")?).filter(|user| !user.is_empty()),
            password: password.map_or_else(|| password_from(env), |p| Ok(Some(p)))?,
            prefix: DEFAULT_PREFIX.into(),
            lease: Duration::from_secs(DEFAULT_LEASE_S),
            ca: None,
            cert: None,
        };
        settings.set_all(&url)?;
        if settings.user.is_some() && settings.password.is_none() {
            return Err(wrong(
                "names a user but no password",
                &format!("give it in {PASSWORD_FILE_VARIABLE} or {PASSWORD_VARIABLE}"),
            ));
        }
        Ok(Settings::Redis(Box::new(settings)))
    }
}

impl RedisSettings {
    /// What the names of all keys begin with. In a cluster the braces keep all of them on one node,
    /// so that a round goes to one server.
    pub(crate) fn key_prefix(&self) -> String {
        match self.servers {
            Servers::Cluster(_) => format!("{{{}}}", self.prefix),
            _ => self.prefix.clone(),
        }
    }

    /// The settings behind the question mark.
    fn set_all(&mut self, url: &Url) -> Result<()> {
        let (mut cert, mut key) = (None, None);
        for (name, value) in url.query_pairs() {
            match &*name {
                "prefix" => self.prefix = prefix(&value)?,
                "lease" => self.lease = lease(&value)?,
                "ca" | "cert" | "cert-key" if !self.tls => {
                    return Err(wrong(&format!("has '{name}' without TLS"), "rediss://… is right"));
                }
                "ca" => self.ca = Some(value.as_ref().into()),
                "cert" => cert = Some(PathBuf::from(value.as_ref())),
                "cert-key" => key = Some(PathBuf::from(value.as_ref())),
                other => {
                    return Err(wrong(
                        &format!("has the setting '{other}'"),
                        "prefix, lease, ca, cert and cert-key are right",
                    ));
                }
            }
        }
        self.cert = match (cert, key) {
            (Some(cert), Some(key)) => Some((cert, key)),
            (None, None) => None,
            _ => return Err(wrong("has one of cert and cert-key", "both or none are right")),
        };
        Ok(())
    }
}

pub(crate) fn wrong(what: &str, right: &str) -> DirectoryError {
    DirectoryError::Setting(format!("{DEFAULT_VARIABLE} {what}; {right}"))
}

pub(crate) fn decode(text: &str, what: &str) -> Result<String> {
    let text = percent_decode_str(text).decode_utf8();
    text.map(Into::into).map_err(|_| wrong(&format!("has a {what} that is not UTF-8"), RIGHT))
}

fn prefix(text: &str) -> Result<String> {
    let good = |c: char| c.is_ascii_alphanumeric() || "-_.:/".contains(c);
    if text.is_empty() || text.len() > MAX_PREFIX || !text.chars().all(good) {
        let right = format!("1 to {MAX_PREFIX} letters, digits and -_.:/ are right");
        return Err(wrong("has a wrong prefix", &right));
    }
    Ok(text.into())
}

fn lease(text: &str) -> Result<Duration> {
    let seconds = text.parse().ok().filter(|seconds| LEASE_S.contains(seconds));
    let right = format!("seconds from {} to {} are right", LEASE_S.start(), LEASE_S.end());
    seconds
        .map(Duration::from_secs)
        .ok_or_else(|| wrong(&format!("has the lease '{text}'"), &right))
}

/// The password that the environment has, if it has one.
fn password_from(env: impl Fn(&str) -> Option<String>) -> Result<Option<String>> {
    let Some(file) = env(PASSWORD_FILE_VARIABLE) else { return Ok(env(PASSWORD_VARIABLE)) };
    let text = std::fs::read_to_string(Path::new(&file));
    let text = text.map_err(|e| {
        DirectoryError::Setting(format!("{PASSWORD_FILE_VARIABLE}: cannot read {file}: {e}"))
    })?;
    let line = text.trim_end_matches(['\n', '\r']);
    if line.is_empty() {
        return Err(DirectoryError::Setting(format!(
            "{PASSWORD_FILE_VARIABLE}: {file} is empty; a line with the password is right"
        )));
    }
    Ok(Some(line.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redis(text: &str) -> RedisSettings {
        match Settings::parse_with(text, |_| None).unwrap() {
            Settings::Redis(settings) => *settings,
            Settings::Lmdb => panic!("{text}"),
        }
    }

    #[test]
    fn what_is_not_said_is_usual() {
        assert_eq!(Settings::parse_with("", |_| None).unwrap(), Settings::Lmdb);
        assert_eq!(Settings::parse_with("lmdb", |_| None).unwrap(), Settings::Lmdb);
        let plain = redis("redis://10.0.0.1");
        assert_eq!(
            (plain.servers.named()[0].to_string().as_str(), plain.tls, plain.db),
            ("10.0.0.1:6379", false, 0)
        );
        assert_eq!(
            (plain.prefix.as_str(), plain.lease.as_secs(), &plain.user, &plain.password),
            ("unbroken", 60, &None, &None)
        );
        let all = redis("rediss://me:s%40cret@[fd00::1]:7000/3?prefix=lab/2&lease=90&ca=/ca.pem&cert=c&cert-key=k");
        assert_eq!(
            (all.servers.named()[0].to_string().as_str(), all.tls, all.db, all.lease.as_secs()),
            ("[fd00::1]:7000", true, 3, 90)
        );
        assert_eq!((all.user.as_deref(), all.password.as_deref()), (Some("me"), Some("s@cret")));
        assert_eq!((all.ca, all.cert), (Some("/ca.pem".into()), Some(("c".into(), "k".into()))));
    }

    #[test]
    fn several_servers_are_shown_as_they_were_given() {
        let sentinels = redis("rediss+sentinel://me:pw@a,b:5/lab/3");
        let shown = "rediss+sentinel://me@a:26379,b:5/lab/3?prefix=unbroken";
        assert_eq!((sentinels.to_string().as_str(), sentinels.db, sentinels.tls), (shown, 3, true));
        let cluster = redis("redis+cluster://a,b?prefix=lab");
        assert_eq!(cluster.to_string(), "redis+cluster://a:6379,b:6379/0?prefix=lab");
        assert_eq!(
            (cluster.key_prefix(), sentinels.key_prefix()),
            ("{lab}".into(), "unbroken".into())
        );
        let public = Settings::parse_public("redis+sentinel://me:secret@a,b/lab").unwrap_err();
        assert!(public.to_string().contains(PASSWORD_FILE_VARIABLE), "{public}");
    }

    #[test]
    fn a_password_comes_from_where_it_is_not_seen() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().display().to_string();
        let from_file = |name: &str| match name {
            PASSWORD_FILE_VARIABLE => Some(path.clone()),
            _ => Some("not this".into()),
        };
        let empty = Settings::parse_with("redis://me@h", from_file).unwrap_err().to_string();
        assert!(empty.contains("is empty") && empty.contains(&path), "{empty}");
        std::fs::write(file.path(), "of the file\n").unwrap();
        let password = |settings| match settings {
            Settings::Redis(settings) => settings.password.unwrap(),
            Settings::Lmdb => panic!(),
        };
        assert_eq!(
            password(Settings::parse_with("redis://me@h", from_file).unwrap()),
            "of the file"
        );
        let from_env =
            |name: &str| (name == PASSWORD_VARIABLE).then(|| "of the environment".to_string());
        assert_eq!(
            password(Settings::parse_with("redis://h", from_env).unwrap()),
            "of the environment"
        );
        assert_eq!(
            password(Settings::parse_with("redis://:in%20it@h", from_env).unwrap()),
            "in it"
        );
        let shown = format!("{:?} {}", redis("redis://me:secret@h"), redis("redis://:secret@h"));
        assert!(
            !shown.contains("secret") && shown.contains("redis://me@h:6379/0?prefix=unbroken"),
            "{shown}"
        );
        let public = Settings::parse_public("redis://me:secret@h").unwrap_err().to_string();
        assert!(public.contains(PASSWORD_FILE_VARIABLE) && !public.contains("secret"), "{public}");
    }

    #[test]
    fn what_is_wrong_is_named_with_what_is_right() {
        for (text, what, right) in [
            ("10.0.0.1:6379", "is no URL", "redis://"),
            ("http://h", "'http:'", "redis://"),
            ("redis://", "no host", "redis://"),
            ("redis:///3", "no host", "redis://"),
            ("redis://h/x", "database 'x'", "a number"),
            ("redis+cluster://h/3", "database 3", "0 alone"),
            ("redis://h?lease=1", "lease '1'", "seconds from 2"),
            ("redis://h?lease=soon", "lease 'soon'", "seconds from 2"),
            ("redis://h?prefix=", "prefix", "letters"),
            ("redis://h?prefix=a%20b", "prefix", "letters"),
            ("redis://h?colour=red", "'colour'", "prefix, lease"),
            ("redis://h?ca=x", "without TLS", "rediss://"),
            ("rediss://h?cert=x", "one of cert", "both"),
            ("redis://me@h", "no password", PASSWORD_FILE_VARIABLE),
            ("redis://me:%ff@h", "password that is not UTF-8", "redis://"),
        ] {
            let error = Settings::parse_with(text, |_| None).unwrap_err().to_string();
            assert!(error.contains(what) && error.contains(right), "{text}: {error}");
        }
    }
}

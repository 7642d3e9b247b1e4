//! A small HTTP server: one thread, bounded in connections, bytes and time.
//!
//! Who asks may be anybody who reaches the address. A request must name the address as its host,
//! else a page elsewhere could read from here by a name of its own that leads here (DNS rebinding).
//! Where a token is asked for, it comes in a header, which no page elsewhere can send.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::header::{AUTHORIZATION, HOST, ORIGIN};
use axum::http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use axum::{middleware, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::error::{Result, WebError};

/// Connections at a time; for one more, the oldest that is silent is closed.
const MAX_CONNECTIONS: usize = 64;
/// A client has so long to send the head of a request, also the next one on a connection.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// A connection lives no longer: who goes on asking connects again.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);
/// The least buffer that the library takes, and the longest head of a request.
const HEAD_BYTES: usize = 8192;
/// Pause where no connection can be accepted: no descriptor is left.
const REST: Duration = Duration::from_millis(200);

/// Who may ask.
#[derive(Clone, Debug)]
pub(crate) struct Gate {
    address: SocketAddr,
    token: Option<Arc<str>>,
}

impl Gate {
    pub(crate) fn new(address: SocketAddr, token: Option<Arc<str>>) -> Gate {
        Gate { address, token }
    }

    /// Whether the request names its host twice, or its origin. A proxy in between may have looked
    /// at the other one.
    pub(crate) fn is_ambiguous(headers: &HeaderMap) -> bool {
        [HOST, ORIGIN].iter().any(|name| headers.get_all(name).iter().nth(1).is_some())
    }

    /// Whether the request is one of this server's own, and not of a page elsewhere.
    pub(crate) fn is_ours(&self, headers: &HeaderMap) -> bool {
        let Some(host) = headers.get(HOST).and_then(|host| host.to_str().ok()) else {
            return false;
        };
        let origin = headers.get(ORIGIN).map(|origin| origin.to_str().unwrap_or("?"));
        let is_own = |origin: &str| origin.strip_prefix("http://") == Some(host);
        self.names(host) && origin.is_none_or(is_own)
    }

    /// Whether a host's name means this server: on the loopback interface its addresses and
    /// `localhost`, else any address, or name that the token's owner uses.
    fn names(&self, host: &str) -> bool {
        if !self.address.ip().is_loopback() {
            return self.token.is_some();
        }
        // Clients leave out the port that is usual.
        let (name, port) = match host.rsplit_once(':').filter(|(_, port)| !port.ends_with(']')) {
            Some((name, port)) => (name, port.parse().ok()),
            None => (host, Some(80)),
        };
        if port != Some(self.address.port()) {
            return false;
        }
        let ip = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        name.eq_ignore_ascii_case("localhost") || ip.is_ok_and(|ip| ip.is_loopback())
    }

    /// Whether the request has the token. False where there is none to be had.
    pub(crate) fn has_token(&self, headers: &HeaderMap) -> bool {
        let given = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let given = given.and_then(|value| value.strip_prefix("Bearer "));
        match (&self.token, given) {
            (Some(token), Some(given)) => is_same(token.as_bytes(), given.as_bytes()),
            _ => false,
        }
    }
}

/// Compares in a time that says nothing about where they differ.
fn is_same(one: &[u8], other: &[u8]) -> bool {
    let differs = one.iter().zip(other).fold(0, |all, (a, b)| all | (a ^ b));
    one.len() == other.len() && differs == 0
}

/// Refuses what must not be served, and has browsers take no part of a page from elsewhere.
pub(crate) async fn guard(
    gate: Gate,
    request: Request<Body>,
    next: axum::middleware::Next,
) -> Response<Body> {
    let headers = request.headers();
    let mut response = match (Gate::is_ambiguous(headers), gate.is_ours(headers)) {
        (true, _) => refusal(StatusCode::BAD_REQUEST, "more than one Host or Origin header\n"),
        (_, true) => next.run(request).await,
        _ => refusal(StatusCode::FORBIDDEN, "the Host or Origin header names another server\n"),
    };
    let headers = response.headers_mut();
    for (name, value) in [
        ("content-security-policy", "default-src 'self'; frame-ancestors 'none'; base-uri 'none'"),
        ("x-content-type-options", "nosniff"),
        ("x-frame-options", "DENY"),
        ("referrer-policy", "no-referrer"),
        ("cross-origin-resource-policy", "same-origin"),
        ("cache-control", "no-store"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

/// A refusal with its reason as text.
pub(crate) fn refusal(status: StatusCode, why: impl Into<String>) -> Response<Body> {
    let mut response = Response::new(Body::from(why.into()));
    *response.status_mut() = status;
    let text = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert("content-type", text);
    response
}

/// Listens at an address, says at which, and serves until the process ends.
pub(crate) fn serve(
    address: SocketAddr,
    app: impl FnOnce(SocketAddr) -> Router,
    ready: impl FnOnce(SocketAddr),
) -> Result<()> {
    let failed = |source| WebError::Listen { address, source };
    let listener = std::net::TcpListener::bind(address).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(4)
        .build()
        .map_err(failed)?;
    runtime.block_on(async {
        let listener = TcpListener::from_std(listener).map_err(failed)?;
        ready(bound);
        accept(listener, app(bound)).await;
        Ok(())
    })
}

async fn accept(listener: TcpListener, app: Router) {
    let mut open = Connections::default();
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(REST).await;
            continue;
        };
        open.make_room();
        let served = Arc::new(AtomicBool::new(false));
        let asked = served.clone();
        let app = app.clone().layer(middleware::from_fn(move |request, next: middleware::Next| {
            asked.store(true, Relaxed);
            next.run(request)
        }));
        let task = tokio::spawn(async move {
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_TIMEOUT)
                .max_buf_size(HEAD_BYTES)
                .serve_connection(TokioIo::new(stream), TowerToHyperService::new(app));
            // A client that went away is its own affair.
            let _ = timeout(CONNECTION_TIMEOUT, connection).await;
        });
        open.0.push_back(Open { task, served });
    }
}

/// A connection.
struct Open {
    task: JoinHandle<()>,
    /// It has asked for something.
    served: Arc<AtomicBool>,
}

/// The connections, the oldest first.
#[derive(Default)]
struct Connections(VecDeque<Open>);

impl Connections {
    /// Makes room for one more: the oldest that has not asked for anything is closed, or the
    /// oldest of all. So clients that are slow keep nobody waiting.
    fn make_room(&mut self) {
        self.0.retain(|open| !open.task.is_finished());
        if self.0.len() < MAX_CONNECTIONS {
            return;
        }
        let silent = self.0.iter().position(|open| !open.served.load(Relaxed)).unwrap_or(0);
        if let Some(closed) = self.0.remove(silent) {
            closed.task.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpStream;

    /// Whoever holds connections and says nothing, or one byte after the other, keeps nobody from
    /// being answered, and loses them.
    #[test]
    fn clients_that_say_nothing_keep_nobody_waiting() {
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let app = |_| Router::new().route("/", axum::routing::get(|| async { "here" }));
            serve("127.0.0.1:0".parse().unwrap(), app, |at| tell.send(at).unwrap()).unwrap();
        });
        let address = told.recv().unwrap();
        let connect = || {
            let stream = TcpStream::connect(address).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            stream
        };
        let began = std::time::Instant::now();
        let mut silent: Vec<TcpStream> = (0..2 * MAX_CONNECTIONS).map(|_| connect()).collect();
        for client in &mut silent[..] {
            // It may be closed already.
            let _ = client.write_all(b"G");
        }
        for _ in 0..2 * MAX_CONNECTIONS {
            let mut client = connect();
            client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
            let mut answer = String::new();
            client.read_to_string(&mut answer).unwrap();
            assert!(answer.ends_with("here"), "{answer}");
        }
        assert!(began.elapsed() < HEAD_TIMEOUT / 2, "{:?}", began.elapsed());
        let mut first = silent.swap_remove(0);
        assert!(matches!(first.read(&mut [0]), Ok(0) | Err(_)), "the oldest was closed");
        assert!(began.elapsed() < HEAD_TIMEOUT / 2, "{:?}", began.elapsed());
    }

    fn headers(of: &[(&'static str, &str)]) -> HeaderMap {
        of.iter()
            .map(|(name, value)| {
                let name = axum::http::HeaderName::from_static(name);
                (name, HeaderValue::from_str(value).unwrap())
            })
            .collect()
    }

    #[test]
    fn another_host_or_origin_is_refused() {
        let gate = Gate::new("127.0.0.1:8080".parse().unwrap(), None);
        let ours = |of: &[(&'static str, &str)]| gate.is_ours(&headers(of));
        assert!(ours(&[("host", "127.0.0.1:8080")]) && ours(&[("host", "localhost:8080")]));
        assert!(ours(&[("host", "[::1]:8080"), ("origin", "http://[::1]:8080")]));
        for host in ["evil.example:8080", "127.0.0.1:81", "127.0.0.1", "127.0.0.1.evil:8080", ""] {
            assert!(!ours(&[("host", host)]), "{host}");
        }
        assert!(!ours(&[]));
        let usual = Gate::new("127.0.0.1:80".parse().unwrap(), None);
        let ours_at_80 = |host| usual.is_ours(&headers(&[("host", host)]));
        assert!(["127.0.0.1", "127.0.0.1:80", "[::1]", "LocalHost"].into_iter().all(ours_at_80));
        assert!(!ours_at_80("evil.example") && !ours_at_80("127.0.0.1:8080"));
        assert!(!ours(&[("host", "localhost:8080"), ("origin", "http://evil.example")]));
        assert!(!ours(&[("host", "localhost:8080"), ("origin", "null")]));
    }

    #[test]
    fn a_second_host_or_origin_is_no_request() {
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let app = |at| {
                let gate = Gate::new(at, None);
                let check = move |request, next| guard(gate.clone(), request, next);
                let here = axum::routing::get(|| async { "here" });
                Router::new().route("/", here).layer(middleware::from_fn(check))
            };
            serve("127.0.0.1:0".parse().unwrap(), app, |at| tell.send(at).unwrap()).unwrap();
        });
        let address = told.recv().unwrap();
        let own = format!("host: {address}\r\n");
        for (more, status) in [
            (String::new(), "200"),
            (format!("origin: http://{address}\r\n"), "200"),
            (own.clone(), "400"),
            ("host: evil.example\r\n".into(), "400"),
            (format!("origin: http://{address}\r\norigin: http://evil.example\r\n"), "400"),
        ] {
            let mut client = TcpStream::connect(address).unwrap();
            let request = format!("GET / HTTP/1.1\r\n{own}{more}connection: close\r\n\r\n");
            client.write_all(request.as_bytes()).unwrap();
            let mut answer = String::new();
            client.read_to_string(&mut answer).unwrap();
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{more:?}: {answer}");
        }
    }

    #[test]
    fn a_token_must_be_the_same() {
        let gate = Gate::new("10.0.0.1:80".parse().unwrap(), Some("secret".into()));
        let has = |text: &str| gate.has_token(&headers(&[("authorization", text)]));
        assert!(has("Bearer secret"));
        for wrong in ["Bearer secre", "Bearer secret2", "Bearer ", "secret", "Basic secret"] {
            assert!(!has(wrong), "{wrong}");
        }
        let none = Gate::new("127.0.0.1:80".parse().unwrap(), None);
        assert!(!none.has_token(&headers(&[("authorization", "Bearer ")])));
    }
}

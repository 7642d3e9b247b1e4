//! The page of `unbroken web`, and what it asks for.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{to_bytes, Body, Bytes};
use axum::extract::Query;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use axum::routing::{get, post};
use axum::{middleware, Router};
use serde::Deserialize;
use tokio::time::timeout;
use unbroken_fabric::Runtime;
use unbroken_observe::Action;

use crate::error::{Result, WebError};
use crate::metrics;
use crate::server::{guard, refusal, serve, Gate};
use crate::source::Source;
use crate::state::State;

/// What is asked to be changed is no longer than this.
const MAX_BODY_BYTES: usize = 1024;
/// ... and comes within this time.
const BODY_TIMEOUT: Duration = Duration::from_secs(2);

/// The files of the page: path, type, contents.
const ASSETS: [(&str, &str, &str); 5] = [
    ("/", "text/html; charset=utf-8", include_str!("../assets/index.html")),
    ("/app.js", "text/javascript; charset=utf-8", include_str!("../assets/app.js")),
    ("/draw.js", "text/javascript; charset=utf-8", include_str!("../assets/draw.js")),
    ("/style.css", "text/css; charset=utf-8", include_str!("../assets/style.css")),
    ("/icon.svg", "image/svg+xml", include_str!("../assets/icon.svg")),
];

/// How the page is served.
#[derive(Clone, Debug)]
pub struct PageOptions {
    /// Where.
    pub address: SocketAddr,
    /// What clients must have to change something.
    pub token: Arc<str>,
    /// Whether they must have it to look, too: always so where the address is not of the loopback
    /// interface.
    pub is_private: bool,
}

/// Which queue pairs are to be listed.
#[derive(Deserialize)]
struct Part {
    #[serde(default)]
    from: usize,
    #[serde(default)]
    count: usize,
}

/// Serves the page of a runtime folder until the process ends.
pub fn serve_page(
    runtime: &Runtime,
    options: &PageOptions,
    ready: impl FnOnce(SocketAddr),
) -> Result<()> {
    let is_private = options.is_private || !options.address.ip().is_loopback();
    if options.token.is_empty() {
        return Err(WebError::Open(options.address));
    }
    let source = Source::new(runtime);
    let app = |bound| {
        let gate = Gate::new(bound, Some(options.token.clone()));
        router(runtime.clone(), source, gate, is_private)
    };
    serve(options.address, app, ready)
}

fn router(runtime: Runtime, source: Source, gate: Gate, is_private: bool) -> Router {
    let may_look = {
        let gate = gate.clone();
        move |headers: &HeaderMap| !is_private || gate.has_token(headers)
    };
    let state = {
        let (source, may_look, gate) = (source.clone(), may_look.clone(), gate.clone());
        move |headers: HeaderMap, Query(part): Query<Part>| async move {
            match may_look(&headers) {
                true => state(source, part, gate.has_token(&headers)).await,
                false => no_token(),
            }
        }
    };
    let metrics = move |headers: HeaderMap| async move {
        match may_look(&headers) {
            true => metrics::page(source).await,
            false => no_token(),
        }
    };
    let act = {
        let gate = gate.clone();
        move |request: Request<Body>| async move {
            // Before its body is waited for: strangers get no more of a connection than its head.
            if !gate.has_token(request.headers()) {
                return no_token();
            }
            let (parts, body) = request.into_parts();
            match timeout(BODY_TIMEOUT, to_bytes(body, MAX_BODY_BYTES)).await {
                Ok(Ok(body)) => act(runtime, parts.headers, body).await,
                Ok(Err(_)) => refusal(StatusCode::PAYLOAD_TOO_LARGE, "an action is shorter\n"),
                Err(_) => refusal(StatusCode::REQUEST_TIMEOUT, "the action did not come\n"),
            }
        }
    };
    let mut app = Router::new()
        .route("/api/state", get(state))
        .route("/api/act", post(act))
        .route("/metrics", get(metrics));
    // They hold nothing that is secret, and the token is typed into them.
    for (path, kind, text) in ASSETS {
        app = app.route(path, get(move || async move { answer(kind, text) }));
    }
    app.layer(middleware::from_fn(move |request, next| guard(gate.clone(), request, next)))
}

fn no_token() -> Response<Body> {
    refusal(StatusCode::UNAUTHORIZED, "the token is missing or wrong\n")
}

fn answer(kind: &'static str, text: impl Into<Body>) -> Response<Body> {
    let mut response = Response::new(text.into());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

async fn state(source: Source, part: Part, may_change: bool) -> Response<Body> {
    let read = move || -> std::result::Result<String, String> {
        let snapshot = source.look().map_err(|e| e.to_string())?;
        let state = State::of(&snapshot, part.from, part.count, may_change);
        serde_json::to_string(&state).map_err(|e| e.to_string())
    };
    match tokio::task::spawn_blocking(read).await {
        Ok(Ok(json)) => answer("application/json", json),
        Ok(Err(why)) => refusal(StatusCode::INTERNAL_SERVER_ERROR, why + "\n"),
        Err(e) => refusal(StatusCode::INTERNAL_SERVER_ERROR, format!("{e}\n")),
    }
}

async fn act(runtime: Runtime, headers: HeaderMap, body: Bytes) -> Response<Body> {
    if headers.get(CONTENT_TYPE).is_none_or(|kind| kind != "application/json") {
        return refusal(StatusCode::UNSUPPORTED_MEDIA_TYPE, "right is application/json\n");
    }
    let action: Action = match serde_json::from_slice(&body) {
        Ok(action) => action,
        Err(e) => return refusal(StatusCode::BAD_REQUEST, format!("no action: {e}\n")),
    };
    match tokio::task::spawn_blocking(move || action.carry_out(&runtime)).await {
        Ok(Ok(done)) => answer("application/json", serde_json::json!({ "done": done }).to_string()),
        Ok(Err(e)) => refusal(StatusCode::BAD_REQUEST, format!("{e}\n")),
        Err(e) => refusal(StatusCode::INTERNAL_SERVER_ERROR, format!("{e}\n")),
    }
}

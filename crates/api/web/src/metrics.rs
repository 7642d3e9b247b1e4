//! The endpoint for Prometheus.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, Response, StatusCode};
use axum::routing::get;
use axum::{middleware, Router};
use unbroken_observe::metrics;

use crate::error::{Result, WebError};
use crate::server::{guard, refusal, serve, Gate};
use crate::source::{Find, Source};

/// What Prometheus takes for its text format.
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Serves the metrics of a runtime folder under `/metrics` until the process ends. The folder may
/// come later: it is looked for with each request, and never made. An address that is not of the
/// loopback interface needs a token, which clients send as `Authorization: Bearer`.
pub fn serve_metrics(
    find: Find,
    address: SocketAddr,
    token: Option<Arc<str>>,
    ready: impl FnOnce(SocketAddr),
) -> Result<()> {
    if !address.ip().is_loopback() && token.is_none() {
        return Err(WebError::Open(address));
    }
    let source = Source::found_by(find);
    let app = |bound| {
        let gate = Gate::new(bound, token.clone());
        let needs_token = token.is_some();
        let page = {
            let gate = gate.clone();
            move |headers: HeaderMap| async move {
                match !needs_token || gate.has_token(&headers) {
                    true => page(source).await,
                    false => refusal(StatusCode::UNAUTHORIZED, "the token is missing or wrong\n"),
                }
            }
        };
        let app = Router::new().route("/metrics", get(page));
        app.layer(middleware::from_fn(move |request, next| guard(gate.clone(), request, next)))
    };
    serve(address, app, ready)
}

/// The metrics as they are now.
pub(crate) async fn page(source: Source) -> Response<Body> {
    let read = tokio::task::spawn_blocking(move || source.look().map(|s| metrics(&s))).await;
    match read {
        Ok(Ok(text)) => {
            let mut response = Response::new(Body::from(text));
            response.headers_mut().insert("content-type", HeaderValue::from_static(TEXT));
            response
        }
        Ok(Err(e)) => refusal(StatusCode::INTERNAL_SERVER_ERROR, format!("{e}\n")),
        Err(e) => refusal(StatusCode::INTERNAL_SERVER_ERROR, format!("{e}\n")),
    }
}

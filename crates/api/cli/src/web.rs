//! `unbroken web`.

use std::net::SocketAddr;
use std::path::PathBuf;

use unbroken_web::{new_token, read_token, serve_page, PageOptions};

use crate::output::{Failure, Result};
use crate::place::Place;

#[derive(clap::Args)]
pub(crate) struct WebArgs {
    /// Where to serve it; port 0 is any that is free
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:7435")]
    listen: SocketAddr,
    /// Take the token in this file, and ask for it also of those who only look;
    /// needed where the address is not of the loopback interface
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

pub(crate) const AFTER: &str = "Examples:
  unbroken web
  unbroken web --listen 127.0.0.1:0
  ssh -L 7435:127.0.0.1:7435 node17 unbroken web

Everybody on this machine may look. To set faults or drain NICs takes the
token, which is in the address that is printed. From other machines, use ssh as
above; with --token-file it can be served to others, who send the token in the
clear.";

pub(crate) fn run(place: &Place, args: &WebArgs) -> Result {
    let failed = |e: unbroken_web::WebError| Failure::Text(e.to_string());
    if !args.listen.ip().is_loopback() && args.token_file.is_none() {
        return Err(failed(unbroken_web::WebError::Open(args.listen)));
    }
    let token = match &args.token_file {
        Some(path) => read_token(path).map_err(failed)?,
        None => new_token().map_err(|e| Failure::io("cannot make a token", e))?,
    };
    let is_private = args.token_file.is_some();
    let options = PageOptions { address: args.listen, token: token.clone(), is_private };
    serve_page(&place.look_where_something_is()?, &options, |address| {
        // A token that its owner has in a file is not told to whoever sees this screen.
        let fragment = if is_private { String::new() } else { format!("#token={token}") };
        eprintln!("unbroken: http://{address}/{fragment}");
    })
    .map_err(failed)
}

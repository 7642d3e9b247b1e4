//! The configuration of FRR's daemons.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use crate::config::{Config, Role};

/// The configuration of one daemon.
pub fn text(config: &Config, daemon: &str) -> String {
    let head = format!("frr defaults datacenter\nhostname {}\n", config.name);
    match daemon {
        "bfdd" => {
            let (interval, multiplier) = (config.bfd.interval_ms, config.bfd.multiplier);
            format!(
                "{head}bfd\n profile edge\n  transmit-interval {interval}\n  receive-interval \
                 {interval}\n  detect-multiplier {multiplier}\n exit\nexit\n"
            )
        }
        "bgpd" => head + &bgp(config),
        // With groups of the kernel, zebra 8.4 does not notice that the kernel has taken a link
        // that lost its carrier out of a group, and leaves the group without it when the link is
        // back.
        "zebra" => head + "no zebra nexthop kernel enable\n",
        _ => head,
    }
}

/// Each uplink is a session of its own (eBGP), with BFD, for routes between loopbacks. EVPN's
/// sessions lead from loopback to loopback over whatever way there is, without BFD: that a link is
/// dead is no news about addresses. A host tells of itself only, so that nobody sends through it.
fn bgp(config: &Config) -> String {
    let Config { asn, loopback, .. } = config;
    let own = if config.role == Role::Host { "match as-path own\n " } else { "" };
    let mut text = format!(
        "bgp as-path access-list own permit ^$\n\
         route-map own permit 10\n \
          match as-path own\n\
         exit\n\
         route-map drain-out permit 10\n \
          {own}\
          set community graceful-shutdown additive\n \
          set as-path prepend {asn} {asn} {asn}\n\
         exit\n\
         route-map drain-in permit 10\n \
          set local-preference 0\n\
         exit\n\
         router bgp {asn}\n \
          bgp router-id {loopback}\n \
          no bgp ebgp-requires-policy\n \
          no bgp default ipv4-unicast\n \
          no bgp network import-check\n \
          bgp bestpath as-path multipath-relax\n \
          timers bgp 3 9\n \
          neighbor link peer-group\n \
          neighbor link bfd profile edge\n \
          neighbor link timers connect 1\n \
          neighbor link advertisement-interval 0\n \
          neighbor overlay peer-group\n \
          neighbor overlay ebgp-multihop\n \
          neighbor overlay update-source {loopback}\n \
          neighbor overlay timers 10 30\n \
          neighbor overlay timers connect 1\n \
          neighbor overlay advertisement-interval 0\n"
    );
    let mut line = |l: String| {
        text.push_str(&l);
        text.push('\n');
    };
    // Two uplinks may lead to one neighbour.
    let switches: BTreeMap<Ipv4Addr, u32> =
        config.uplinks.iter().map(|u| (u.peer_loopback, u.peer_asn)).collect();
    let links = config.uplinks.iter().map(|u| (u.peer, u.peer_asn, "link"));
    for (peer, asn, group) in
        links.chain(switches.into_iter().map(|(peer, asn)| (peer, asn, "overlay")))
    {
        line(format!(" neighbor {peer} remote-as {asn}"));
        line(format!(" neighbor {peer} peer-group {group}"));
    }
    for (family, group) in [("ipv4 unicast", "link"), ("l2vpn evpn", "overlay")] {
        line(format!(" address-family {family}"));
        line(format!("  neighbor {group} activate"));
        if config.role == Role::Host {
            line(format!("  neighbor {group} route-map own out"));
        }
        match group {
            "link" => {
                line(format!("  network {loopback}/32"));
                line(format!("  maximum-paths {}", config.uplinks.len().min(64)));
            }
            _ if config.role == Role::Host => line("  advertise-all-vni".into()),
            _ => {}
        }
        line(" exit-address-family".into());
    }
    text
}

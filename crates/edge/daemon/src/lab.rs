//! A network to try it in: hosts with two uplinks each, two ToR switches and the link between them,
//! in network namespaces.
//!
//! Host *n* is the namespace `<prefix>h<n>` with the loopback 10.255.0.*n*, the tenant 100 and the
//! virtual function `vf0` with the address 192.168.9.*n*; the switches are `<prefix>t1` and
//! `<prefix>t2`. On a switch the port to host *n* is `h<n>`, and `isl` is the link to the other.
//! All are set up by `unbroken edge up` from an `edge.toml` as any host would be.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use crate::command::run;
use crate::error::{EdgeError, Result};
use crate::folder::Folder;
use crate::state;

/// The most hosts: their names and addresses have one number.
pub const MOST_HOSTS: u8 = 64;
const UPLINK_MTU: u32 = 9000;

/// What a lab is to be.
#[derive(Clone, Debug)]
pub struct Lab {
    /// The beginning of its namespaces' names.
    pub prefix: String,
    /// How many hosts it has.
    pub hosts: u8,
    /// Milliseconds between two BFD packets.
    pub bfd_ms: u32,
    /// Where rules work, as in `edge.toml`.
    pub rules: String,
    /// `fast_failover` of all.
    pub fast_failover: bool,
    /// A second tenant (200), whose virtual functions have the MAC addresses of the first, in
    /// namespaces `<prefix>h<n>b`.
    pub second_tenant: bool,
    /// Folder of the configurations. Nobody but root may write into it, nor into the one above it.
    pub folder: PathBuf,
}

impl Lab {
    /// The folder of the lab with a prefix: below that of all edges, where only root can make one.
    /// No edge has its name.
    pub fn folder_of(prefix: &str) -> Result<PathBuf> {
        let good = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        match prefix.chars().all(good) && !prefix.starts_with(['.', '-']) {
            true => Ok(state::root().join(format!(".lab-{prefix}"))),
            false => Err(EdgeError::Refused(format!(
                "'{prefix}' is no prefix of names: letters, digits, '_', '-' or '.'"
            ))),
        }
    }

    /// The namespace of a host.
    pub fn host(&self, number: u8) -> String {
        format!("{}h{number}", self.prefix)
    }

    /// The namespace of a switch.
    pub fn tor(&self, number: u8) -> String {
        format!("{}t{number}", self.prefix)
    }

    /// All nodes' namespaces, switches first.
    pub fn nodes(&self) -> Vec<String> {
        (1..=2).map(|t| self.tor(t)).chain((1..=self.hosts).map(|h| self.host(h))).collect()
    }

    fn second(&self, host: u8) -> String {
        format!("{}b", self.host(host))
    }

    /// Makes namespaces, links and configurations, and sets all up with `command` (the `unbroken`
    /// program).
    pub fn up(&self, command: &Path) -> Result<()> {
        if !(2..=MOST_HOSTS).contains(&self.hosts) {
            return Err(EdgeError::Refused(format!(
                "a lab has 2 to {MOST_HOSTS} hosts, not {}",
                self.hosts
            )));
        }
        let there = namespaces()?;
        if let Some(taken) = self.nodes().iter().find(|n| there.contains(n)) {
            return Err(EdgeError::Refused(format!(
                "there is a namespace '{taken}' already; use another prefix, or take that lab down"
            )));
        }
        let done = self.make().and_then(|()| {
            self.nodes().iter().try_for_each(|node| {
                let (config, command) = (self.config_path(node), command.display().to_string());
                let config = config.display().to_string();
                run(&["ip", "netns", "exec", node, &command, "edge", "up", "--config", &config])
                    .map(drop)
            })
        });
        done.inspect_err(|_| drop(self.down(command)))
    }

    /// Takes all down; what is gone already is not missed.
    pub fn down(&self, command: &Path) -> Result<()> {
        for node in self.nodes() {
            let command = command.display().to_string();
            let _ = run(&["ip", "netns", "exec", &node, &command, "edge", "down", "--name", &node]);
        }
        let there = namespaces()?;
        let ours = self.nodes().into_iter().chain((1..=self.hosts).map(|h| self.second(h)));
        for node in ours.filter(|n| there.contains(n)) {
            run(&["ip", "netns", "del", &node])?;
        }
        match self.folder.exists() {
            true => Folder::open(&self.folder)?.remove(),
            false => Ok(()),
        }
    }

    fn config_path(&self, node: &str) -> PathBuf {
        self.folder.join(format!("{node}.toml"))
    }

    fn make(&self) -> Result<()> {
        let second = (1..=self.hosts).filter(|_| self.second_tenant).map(|h| self.second(h));
        for node in self.nodes().into_iter().chain(second) {
            run(&["ip", "netns", "add", &node])?;
            run(&["ip", "-n", &node, "link", "set", "lo", "up"])?;
        }
        for tor in 1..=2 {
            for host in 1..=self.hosts {
                self.link(
                    (&self.host(host), &format!("p{tor}")),
                    (&self.tor(tor), &format!("h{host}")),
                )?;
            }
        }
        self.link((&self.tor(1), "isl"), (&self.tor(2), "isl"))?;
        state::make_root()?;
        let folder = Folder::make(&self.folder, 0o700)?;
        let hosts = (1..=self.hosts).map(|h| (self.host(h), self.host_config(h)));
        for (node, text) in hosts.chain((1..=2).map(|t| (self.tor(t), self.tor_config(t)))) {
            folder.replace(&format!("{node}.toml"), &text)?;
        }
        Ok(())
    }

    fn link(&self, a: (&str, &str), b: (&str, &str)) -> Result<()> {
        let mtu = UPLINK_MTU.to_string();
        run(&[
            "ip", "link", "add", a.1, "netns", a.0, "mtu", &mtu, "type", "veth", "peer", "name",
            b.1, "netns", b.0, "mtu", &mtu,
        ])
        .map(drop)
    }

    fn head(&self, name: &str, loopback: &str, asn: u32) -> String {
        format!(
            "name = \"{name}\"\nloopback = \"{loopback}\"\nasn = {asn}\nmtu = {}\nfast_failover = \
             {}\n",
            UPLINK_MTU - 50,
            self.fast_failover
        )
    }

    fn bfd(&self) -> String {
        format!("\n[bfd]\ninterval_ms = {}\nmultiplier = 3\n", self.bfd_ms)
    }

    /// The configuration of a host.
    pub fn host_config(&self, host: u8) -> String {
        let mut text =
            self.head(&self.host(host), &format!("10.255.0.{host}"), 65_000 + u32::from(host));
        let mut add = |t: String| text.push_str(&t);
        add(format!("rules = \"{}\"\n", self.rules));
        add(self.bfd());
        for tor in 1..=2 {
            add(uplink(
                &format!("p{tor}"),
                &format!("10.{tor}.{host}.1/31"),
                &format!("10.{tor}.{host}.0"),
                65_100 + tor,
                &format!("10.255.1.{tor}"),
            ));
        }
        let port = |vni: u32, rep: &str, netns: &str| {
            format!(
                "\n[[tenant]]\nvni = {vni}\n\n[[tenant.port]]\nrepresentor = \"{rep}\"\nveth \
                 = \"vf0\"\n{netns}mac = \"02:00:00:00:09:{host:02x}\"\naddress \
                 = \"192.168.9.{host}/24\"\n"
            )
        };
        add(port(100, "rep0", ""));
        if self.second_tenant {
            add(port(200, "rep1", &format!("netns = \"{}\"\n", self.second(host))));
        }
        text
    }

    /// The configuration of a switch.
    pub fn tor_config(&self, tor: u8) -> String {
        let head = self.head(&self.tor(tor), &format!("10.255.1.{tor}"), 65_100 + u32::from(tor));
        let mut text = head + "role = \"switch\"\n" + &self.bfd();
        for host in 1..=self.hosts {
            let (ours, theirs) = (format!("10.{tor}.{host}.0/31"), format!("10.{tor}.{host}.1"));
            text += &uplink(
                &format!("h{host}"),
                &ours,
                &theirs,
                65_000 + u32::from(host),
                &format!("10.255.0.{host}"),
            );
        }
        let other = 3 - tor;
        text += &uplink(
            "isl",
            &format!("10.3.0.{}/31", tor - 1),
            &format!("10.3.0.{}", other - 1),
            65_100 + u32::from(other),
            &format!("10.255.1.{other}"),
        );
        text + "backup = true\n"
    }
}

fn uplink(device: &str, address: &str, peer: &str, asn: u32, loopback: &str) -> String {
    let mut text = String::new();
    // writing to a String cannot fail
    let _ = write!(
        text,
        "\n[[uplink]]\ndevice = \"{device}\"\naddress = \"{address}\"\npeer = \"{peer}\"\npeer_asn \
         = {asn}\npeer_loopback = \"{loopback}\"\n"
    );
    text
}

fn namespaces() -> Result<Vec<String>> {
    let list = run(&["ip", "netns", "list"])?;
    Ok(list.lines().filter_map(|l| l.split_whitespace().next()).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Role};

    #[test]
    fn all_configurations_are_good_and_links_have_two_ends() {
        let lab = Lab {
            prefix: "x".into(),
            hosts: 3,
            bfd_ms: 10,
            rules: "none".into(),
            fast_failover: true,
            second_tenant: true,
            folder: "/tmp".into(),
        };
        let hosts: Vec<Config> =
            (1..=3).map(|h| Config::parse(&lab.host_config(h)).unwrap()).collect();
        let tors: Vec<Config> =
            (1..=2).map(|t| Config::parse(&lab.tor_config(t)).unwrap()).collect();
        assert!(tors.iter().all(|t| t.role == Role::Switch && t.uplinks.len() == 4));
        for host in &hosts {
            for (uplink, tor) in host.uplinks.iter().zip(&tors) {
                let other = tor.uplinks.iter().find(|u| u.peer == uplink.address.address).unwrap();
                assert_eq!(
                    (uplink.peer_asn, other.peer_asn, other.address.address),
                    (tor.asn, host.asn, uplink.peer)
                );
                assert_eq!(
                    (uplink.peer_loopback, other.peer_loopback),
                    (tor.loopback, host.loopback)
                );
            }
        }
        assert_eq!(tors[0].uplinks[3].peer, tors[1].uplinks[3].address.address);
        assert!(tors.iter().all(|t| t.uplinks.iter().filter(|u| u.backup).count() == 1));
    }

    #[test]
    fn a_lab_lies_in_the_folder_of_edges_or_nowhere() {
        assert_eq!(Lab::folder_of("edge-").unwrap().parent(), Some(state::root().as_path()));
        for prefix in ["../../etc", "/etc", ".", "a/b"] {
            assert!(Lab::folder_of(prefix).is_err(), "{prefix}");
        }
    }
}

//! What a machine has of what the host edge needs. Kernel features are tried in a network namespace
//! that lasts as long as the try.

use std::path::Path;

use crate::command::{exists, run};
use crate::config::{Config, Rules};
use crate::error::{EdgeError, Result};
use crate::frr::{DAEMONS, NAMES};
use crate::nic;
use crate::state::missing;

/// One thing that was looked for.
#[derive(Clone, Debug)]
pub struct Finding {
    /// What.
    pub what: String,
    /// Why it matters and how to get it, if it is not there.
    pub missing: Option<String>,
    /// Whether nothing works without it.
    pub needed: bool,
}

/// Name, a shell command that works where it is there, whether it is needed, and how to get it.
const FEATURES: [(&str, &str, bool, &str); 8] = [
    ("veth", "ip link add t0 type veth peer name t1", true, "load the kernel module veth \
                                                             (CONFIG_VETH)"),
    ("bridge", "ip link add t0 type bridge", true, "load the kernel module bridge (CONFIG_BRIDGE)"),
    ("vxlan", "ip link add t0 type vxlan id 5 dstport 4789 nolearning", true, "load the kernel \
                                                                               module vxlan \
                                                                               (CONFIG_VXLAN)"),
    (TABLES, "ip rule add pref 9 lookup 9", false, "CONFIG_IP_MULTIPLE_TABLES; fast_failover needs \
                                                    it"),
    (
        "clsact",
        "ip link add t0 type veth peer name t1 && tc qdisc add dev t0 clsact",
        false,
        "load the kernel module sch_ingress (CONFIG_NET_SCH_INGRESS); rules need it",
    ),
    (
        "flower",
        "ip link add t0 type veth peer name t1 && tc qdisc add dev t0 clsact && tc filter add dev \
         t0 ingress flower dst_mac 02:00:00:00:00:01",
        false,
        "load the kernel module cls_flower (CONFIG_NET_CLS_FLOWER); without it leave rules \
         = \"none\"",
    ),
    (
        "tunnel_key",
        "tc actions add action tunnel_key set src_ip 1.1.1.1 dst_ip 1.1.1.2 id 7 dst_port 4789",
        false,
        "load the kernel module act_tunnel_key (CONFIG_NET_ACT_TUNNEL_KEY); without it leave rules \
         = \"none\"",
    ),
    (
        "mirred",
        "ip link add t0 type veth peer name t1 && tc actions add action mirred egress redirect dev \
         t0",
        false,
        "load the kernel module act_mirred (CONFIG_NET_ACT_MIRRED); without it leave rules \
         = \"none\"",
    ),
];

/// What `fast_failover` needs, and what rules do.
const TABLES: &str = "several routing tables";
const OF_RULES: [&str; 4] = ["clsact", "flower", "tunnel_key", "mirred"];

/// Whether a command works in a network namespace of its own.
fn tried(command: &str) -> Result<String> {
    run(&["unshare", "--net", "sh", "-c", &format!("ip link set lo up && {command}")])
}

/// What the kernel lacks of what a configuration needs beyond devices, where that can be tried.
pub(crate) fn lacking(config: &Config) -> Option<String> {
    let needs = |what: &str| match what {
        TABLES => config.fast_failover,
        _ => config.rules != Rules::None && OF_RULES.contains(&what),
    };
    let needed: Vec<_> = FEATURES.iter().filter(|(what, ..)| needs(what)).collect();
    if needed.is_empty() || tried("true").is_err() {
        return None;
    }
    let lacked = needed.iter().filter(|(_, command, ..)| tried(command).is_err());
    let named: Vec<String> = lacked.map(|(what, .., how)| format!("{what} ({how})")).collect();
    (!named.is_empty())
        .then(|| format!("this kernel lacks what the configuration needs: {}", named.join("; ")))
}

/// Looks for everything.
pub fn check(config: Option<&Path>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut add = |what: &str, missing: Option<String>, needed: bool| {
        findings.push(Finding { what: what.to_owned(), missing, needed });
    };
    add("root", (!rustix::process::geteuid().is_root()).then(|| "run as root".into()), true);
    let tools = [
        ("ip", "iproute2"),
        ("bridge", "iproute2"),
        ("tc", "iproute2"),
        ("sysctl", "procps"),
        ("chrt", "util-linux"),
        ("setpriv", "util-linux"),
    ];
    for (tool, package) in tools.into_iter().chain([("vtysh", "frr")]) {
        let how = || format!("install the Debian package {package}");
        add(tool, (!exists(tool)).then(how), tool != "chrt");
    }
    for name in NAMES {
        let how = || "install FRR (Debian package frr)".to_owned();
        add(&format!("FRR's {name}"), (!Path::new(DAEMONS).join(name).is_file()).then(how), true);
    }
    let why =
        |e: EdgeError| e.to_string().rsplit(": ").next().unwrap_or_default().trim().to_owned();
    match tried("true").map_err(why) {
        Ok(_) => {
            add("network namespaces", None, false);
            for (what, command, needed, how) in FEATURES {
                let missing = tried(command).map_err(why).err();
                add(what, missing.map(|why| format!("{how} ({why})")), needed);
            }
        }
        // What was not tried may well be there.
        Err(why) => {
            let what = format!(
                "not allowed here ({why}); run as root. The kernel's features ({}) were not tried",
                FEATURES.map(|(what, ..)| what).join(", ")
            );
            add("network namespaces", Some(what), false);
        }
    }
    let hardware = run(&["devlink", "dev", "show"]).is_ok_and(|t| !t.trim().is_empty());
    let how =
        "no device is managed by devlink, so no NIC offloads rules here: use veth, and rules \
         = \"none\" or \"skip_hw\"";
    add("a NIC with an embedded switch", (!hardware).then(|| how.into()), false);
    if let Some(path) = config {
        let plan =
            Config::read(path).and_then(|c| missing(&c).map_err(EdgeError::at(path.display())));
        let bad = plan.err().map(|e| e.to_string());
        add("the configuration and its devices", bad, true);
        for why in Config::read(path).iter().flat_map(nic::missing_modes) {
            add("switchdev mode of all NICs", Some(why), true);
        }
    }
    findings
}

//! Trees: the way of a shard to its owner, and of the result from there.
//!
//! Nodes are *groups* of ranks (hosts, or single ranks). A shard is reduced along a tree whose root
//! is its owner, and spread from there. Ring, tree and direct differ in the tree alone:
//!
//! | shape | reduce | spread | messages behind each other, one way |
//! | --- | --- | --- | --- |
//! | ring | a chain around the ring that ends at the owner | a chain that begins there | n − 1 |
//! | tree | a binary tree | the same | log₂ n |
//! | direct | everyone sends to the owner | the owner sends to everyone | 1 |
//!
//! Whatever the tree, a node sends as many messages for a shard as it has neighbours in it
//! (reducing and spreading together), and receives as many. All shapes therefore move 2(n − 1)
//! times the data in all; which node carries how much of it is a question of who is in the middle
//! of how many trees.

/// The shape of the trees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shape {
    /// Everyone sends to the owner, who sends to everyone.
    Direct,
    /// Everyone sends everything to everyone, and all are owners of everything: one message instead
    /// of two behind each other, for few bytes. AllReduce alone.
    OneShot,
    /// A chain around the ring.
    Ring,
    /// A binary tree, turned so that the owner is its root.
    Tree,
    /// Rings without the slowest hosts, and a broadcast of what those add ([`crate::paper`]).
    /// AllReduce among hosts alone.
    SubRings,
}

/// What trees over an order of nodes are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// All to the root; `true`: and everyone is a root.
    Star(bool),
    Ring,
    Heap,
    /// So many nodes of the order, the first, are a ring; the others are leaves of it.
    Leaves(usize),
}

/// An order of nodes, and what trees over it are like. Nodes that are not in the order take no
/// part.
#[derive(Clone, Debug)]
pub(crate) struct Forest {
    kind: Kind,
    /// Nodes by position.
    order: Vec<usize>,
    /// Positions by node.
    position: Vec<Option<usize>>,
}

/// A neighbour in a tree, and when the message to or from it goes: messages of a lower level come
/// first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Edge {
    pub node: usize,
    pub level: usize,
}

impl Forest {
    /// Trees of a shape. `order` names each of its nodes once.
    pub fn new(shape: Shape, order: Vec<usize>) -> Forest {
        let kind = match shape {
            Shape::Direct => Kind::Star(false),
            Shape::OneShot => Kind::Star(true),
            Shape::Ring | Shape::SubRings => Kind::Ring,
            Shape::Tree => Kind::Heap,
        };
        Forest::of(kind, order)
    }

    /// Rings with leaves. Roots are on the ring.
    pub fn ring_with_leaves(members: &[usize], leaves: &[usize]) -> Forest {
        Forest::of(Kind::Leaves(members.len()), [members, leaves].concat())
    }

    fn of(kind: Kind, order: Vec<usize>) -> Forest {
        let mut position = vec![None; order.iter().max().map_or(0, |most| most + 1)];
        order.iter().enumerate().for_each(|(p, node)| position[*node] = Some(p));
        Forest { kind, order, position }
    }

    /// How many nodes take part.
    pub fn nodes(&self) -> usize {
        self.order.len()
    }

    /// How many nodes are on the ring, if there is one; else how many there are.
    fn round(&self) -> usize {
        match self.kind {
            Kind::Leaves(members) => members,
            _ => self.nodes(),
        }
    }

    fn position(&self, node: usize) -> Option<usize> {
        self.position.get(node).copied().flatten()
    }

    /// Steps from the root along the order, round the ring; 0 at the root. `None` of leaves and
    /// nodes that take no part.
    fn distance(&self, root: usize, node: usize) -> Option<usize> {
        let n = self.round();
        let (root, node) = (self.position(root)?, self.position(node).filter(|p| *p < n)?);
        Some((node + n - root) % n)
    }

    fn at(&self, root: usize, distance: usize) -> usize {
        self.order[(self.position[root].unwrap_or(0) + distance) % self.round()]
    }

    /// The nodes behind the root, round the ring, the root last.
    pub fn behind(&self, root: usize) -> Vec<usize> {
        (1..=self.round()).map(|d| self.at(root, d)).collect()
    }

    /// Of a leaf: how far from the root it hangs. Leaves hang on different members, the first where
    /// the chain begins.
    fn hangs(&self, node: usize) -> Option<usize> {
        let ring = self.round();
        let leaf = self.position(node)?.checked_sub(ring)?;
        Some(if ring > 1 { 1 + leaf % (ring - 1) } else { 0 })
    }

    /// Whether a node hangs on the ring.
    pub fn is_leaf(&self, node: usize) -> bool {
        self.position(node).is_some_and(|position| position >= self.round())
    }

    /// The leaves that hang at a distance from the root.
    fn leaves(&self, distance: usize) -> impl Iterator<Item = usize> + '_ {
        self.order[self.round()..]
            .iter()
            .copied()
            .filter(move |leaf| self.hangs(*leaf) == Some(distance))
    }

    /// Where a node sends what it has reduced. `None` at the root, and where it takes no part.
    pub fn towards(&self, root: usize, node: usize) -> Option<Edge> {
        let edge = |to, level| Some(Edge { node: self.at(root, to), level });
        if let Some(distance) = self.hangs(node) {
            return edge(distance, distance.saturating_sub(1));
        }
        let n = self.round();
        let d = self.distance(root, node).filter(|d| *d > 0)?;
        match self.kind {
            Kind::Star(_) => edge(0, 0),
            Kind::Ring => edge((d + 1) % n, d - 1),
            // a leaf's part comes first
            Kind::Leaves(_) => edge((d + 1) % n, d),
            Kind::Heap => edge((d - 1) / 2, depth(n - 1) - depth(d)),
        }
    }

    /// From where a node receives what was reduced before it, in the order of levels.
    pub fn before(&self, root: usize, node: usize) -> Vec<Edge> {
        let n = self.round();
        let Some(d) = self.distance(root, node) else { return Vec::new() };
        // the chain begins behind the root
        let ring = (d != 1 && n > 1).then(|| self.at(root, (d + n - 1) % n));
        let from: Vec<usize> = match self.kind {
            Kind::Star(_) if d == 0 => self.order.iter().copied().filter(|x| *x != root).collect(),
            Kind::Star(_) => Vec::new(),
            Kind::Ring => ring.into_iter().collect(),
            Kind::Leaves(_) => ring.into_iter().chain(self.leaves(d)).collect(),
            Kind::Heap => (2 * d + 1..(2 * d + 3).min(n)).map(|son| self.at(root, son)).collect(),
        };
        let level = |node: usize| Some(Edge { node, level: self.towards(root, node)?.level });
        let mut edges: Vec<Edge> = from.into_iter().filter_map(level).collect();
        edges.sort_by_key(|e| e.level);
        edges
    }

    /// From where a node gets the result. `None` at the root, and where it takes no part.
    pub fn source(&self, root: usize, node: usize) -> Option<Edge> {
        let edge = |from, level| Some(Edge { node: self.at(root, from), level });
        if let Some(distance) = self.hangs(node) {
            return edge(distance, distance);
        }
        let d = self.distance(root, node).filter(|d| *d > 0)?;
        match self.kind {
            Kind::Star(_) => edge(0, 0),
            Kind::Ring | Kind::Leaves(_) => edge(d - 1, d - 1),
            Kind::Heap => edge((d - 1) / 2, depth(d) - 1),
        }
    }

    /// To where a node passes the result on.
    pub fn after(&self, root: usize, node: usize) -> Vec<Edge> {
        let n = self.round();
        let Some(d) = self.distance(root, node) else { return Vec::new() };
        let ring = (d + 1 < n).then(|| self.at(root, d + 1));
        let to: Vec<usize> = match self.kind {
            Kind::Star(_) if d == 0 => (1..n).map(|k| self.at(root, k)).collect(),
            Kind::Star(_) => Vec::new(),
            Kind::Ring => ring.into_iter().collect(),
            Kind::Leaves(_) => ring.into_iter().chain(self.leaves(d)).collect(),
            Kind::Heap => (2 * d + 1..(2 * d + 3).min(n)).map(|son| self.at(root, son)).collect(),
        };
        let level = |node: usize| Some(Edge { node, level: self.source(root, node)?.level });
        to.into_iter().filter_map(level).collect()
    }

    /// The nodes that a node sends to or receives from, for this root; some may be named twice.
    pub fn neighbours(&self, root: usize, node: usize) -> Vec<usize> {
        if self.kind == Kind::Star(true) {
            return self.order.iter().copied().filter(|x| *x != node).collect();
        }
        let edges = self.towards(root, node).into_iter().chain(self.source(root, node));
        edges.chain(self.before(root, node)).chain(self.after(root, node)).map(|e| e.node).collect()
    }

    /// Whether everyone sends to the owner, who sends to everyone.
    pub fn is_star(&self) -> bool {
        self.kind == Kind::Star(false)
    }

    /// Of a ring: its nodes in order, the leaves that hang on it, and the level at which what is
    /// reduced begins to go round.
    pub fn ring(&self) -> Option<(&[usize], &[usize], usize)> {
        let first = match self.kind {
            Kind::Ring => 0,
            // a leaf's part comes first
            Kind::Leaves(_) => 1,
            Kind::Star(_) | Kind::Heap => return None,
        };
        let (ring, leaves) = self.order.split_at(self.round());
        Some((ring, leaves, first))
    }

    /// Whether a node may have several messages of one level for one neighbour.
    pub fn repeats_within_level(&self) -> bool {
        self.kind == Kind::Heap
    }
}

/// The depth of the node with this number in a binary heap.
fn depth(number: usize) -> usize {
    (number + 1).ilog2() as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Both ends of every edge know of it, and agree on its level; every node reaches the root,
        /// along rising levels.
        #[test]
        fn trees_are_trees_from_both_ends(
            shape in prop::option::of(prop::sample::select(vec![Shape::Direct, Shape::Ring, Shape::Tree])),
            order in (1usize..20).prop_flat_map(|n| Just((0..n).collect::<Vec<_>>()).prop_shuffle()),
            (left_out, leaves) in (0usize..3, 0usize..5),
            root in any::<prop::sample::Index>(),
        ) {
            let all = order.len();
            let order = order[..(all - left_out.min(all - 1))].to_vec();
            let n = order.len();
            let ring = if shape.is_some() { n } else { n - leaves.min(n - 1) };
            let root = order[root.index(ring)];
            let forest = match shape {
                Some(shape) => Forest::new(shape, order.clone()),
                None => Forest::ring_with_leaves(&order[..ring], &order[ring..]),
            };
            for node in (0..all).filter(|node| !order.contains(node)) {
                prop_assert!(forest.neighbours(root, node).is_empty());
            }
            for leaf in &order[ring..] {
                prop_assert_eq!(forest.neighbours(root, *leaf).len(), 2, "a leaf sends once and \
                                                                          receives once");
            }
            let mut degree = 0;
            for node in order {
                let up = forest.towards(root, node);
                prop_assert_eq!(up.is_none(), node == root);
                for edge in forest.before(root, node) {
                    prop_assert_eq!(forest.towards(root, edge.node), Some(Edge { node, level: edge.level }));
                    prop_assert!(up.is_none_or(|up| edge.level < up.level));
                    degree += 1;
                }
                let from = forest.source(root, node);
                prop_assert_eq!(from.is_none(), node == root);
                for edge in forest.after(root, node) {
                    prop_assert_eq!(forest.source(root, edge.node), Some(Edge { node, level: edge.level }));
                    prop_assert!(from.is_none_or(|from| edge.level > from.level));
                    degree += 1;
                }
            }
            prop_assert_eq!(degree, 2 * (n - 1));
        }
    }
}

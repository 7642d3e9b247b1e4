//! Trees: the way of a shard to its owner, and of the result from there.
//!
//! Nodes are *groups* of ranks (hosts, or single ranks). A shard is reduced along a tree whose root is its owner, and spread from there.
//! Ring, tree and direct differ in the tree alone:
//!
//! | shape | reduce | spread | messages behind each other, one way |
//! | --- | --- | --- | --- |
//! | ring | a chain around the ring that ends at the owner | a chain that begins there | n − 1 |
//! | tree | a binary tree | the same | log₂ n |
//! | direct | everyone sends to the owner | the owner sends to everyone | 1 |
//!
//! Whatever the tree, a node sends as many messages for a shard as it has neighbours in it (reducing and spreading together), and
//! receives as many. All shapes therefore move 2(n − 1) times the data in all; which node carries how much of it is a question of
//! who is in the middle of how many trees.

/// The shape of the trees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shape {
    /// Everyone sends to the owner, who sends to everyone.
    Direct,
    /// Everyone sends everything to everyone, and all are owners of everything: one message instead of two behind each other, for
    /// few bytes. AllReduce alone.
    OneShot,
    /// A chain around the ring.
    Ring,
    /// A binary tree, turned so that the owner is its root.
    Tree,
}

/// What trees over an order of nodes are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// All to the root; `true`: and everyone is a root.
    Star(bool),
    Ring,
    Heap,
    /// From both ends of the order to the middle, and back. For that one root alone.
    Path,
}

/// An order of nodes, and what trees over it are like. Nodes that are not in the order take no part.
#[derive(Clone, Debug)]
pub(crate) struct Forest {
    kind: Kind,
    /// Nodes by position.
    order: Vec<usize>,
    /// Positions by node.
    position: Vec<Option<usize>>,
}

/// A neighbour in a tree, and when the message to or from it goes: messages of a lower level come first.
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
            Shape::Ring => Kind::Ring,
            Shape::Tree => Kind::Heap,
        };
        Forest::of(kind, order)
    }

    /// One tree: a path, whose root is in the middle.
    pub fn path(order: Vec<usize>) -> Forest {
        Forest::of(Kind::Path, order)
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

    /// The node in the middle of the order.
    pub fn middle(&self) -> usize {
        self.order[self.nodes() / 2]
    }

    /// Steps from the root along the order, round the ring; 0 at the root.
    fn distance(&self, root: usize, node: usize) -> Option<usize> {
        let n = self.nodes();
        let position = |node: usize| self.position.get(node).copied().flatten();
        Some((position(node)? + n - position(root)?) % n)
    }

    fn at(&self, root: usize, distance: usize) -> usize {
        self.order[(self.position[root].unwrap_or(0) + distance) % self.nodes()]
    }

    /// Where a node sends what it has reduced. `None` at the root, and where it takes no part.
    pub fn towards(&self, root: usize, node: usize) -> Option<Edge> {
        let n = self.nodes();
        let d = self.distance(root, node).filter(|d| *d > 0)?;
        let edge = |to, level| Some(Edge { node: self.at(root, to), level });
        match self.kind {
            Kind::Star(_) => edge(0, 0),
            Kind::Ring => edge((d + 1) % n, d - 1),
            Kind::Heap => edge((d - 1) / 2, depth(n - 1) - depth(d)),
            // the front half of the order lies behind the root, round the ring
            Kind::Path if d >= self.behind() => edge((d + 1) % n, d - self.behind()),
            Kind::Path => edge(d - 1, self.behind() - 1 - d),
        }
    }

    /// From where a node receives what was reduced before it, in the order of levels.
    pub fn before(&self, root: usize, node: usize) -> Vec<Edge> {
        let n = self.nodes();
        let Some(d) = self.distance(root, node) else { return Vec::new() };
        let from = match self.kind {
            Kind::Star(_) if d == 0 => self.order.iter().copied().filter(|x| *x != root).collect(),
            Kind::Star(_) => Vec::new(),
            // the chain begins behind the root
            Kind::Ring if d == 1 || n == 1 => Vec::new(),
            Kind::Ring => vec![self.at(root, (d + n - 1) % n)],
            Kind::Heap => (2 * d + 1..(2 * d + 3).min(n)).map(|son| self.at(root, son)).collect(),
            Kind::Path => self.beside(root, d),
        };
        let level = |node: usize| Some(Edge { node, level: self.towards(root, node)?.level });
        let mut edges: Vec<Edge> = from.into_iter().filter_map(level).collect();
        edges.sort_by_key(|e| e.level);
        edges
    }

    /// From where a node gets the result. `None` at the root, and where it takes no part.
    pub fn source(&self, root: usize, node: usize) -> Option<Edge> {
        let n = self.nodes();
        let d = self.distance(root, node).filter(|d| *d > 0)?;
        let edge = |from, level| Some(Edge { node: self.at(root, from), level });
        match self.kind {
            Kind::Star(_) => edge(0, 0),
            Kind::Ring => edge(d - 1, d - 1),
            Kind::Heap => edge((d - 1) / 2, depth(d) - 1),
            Kind::Path if d >= self.behind() => edge((d + 1) % n, n - 1 - d),
            Kind::Path => edge(d - 1, d - 1),
        }
    }

    /// To where a node passes the result on.
    pub fn after(&self, root: usize, node: usize) -> Vec<Edge> {
        let n = self.nodes();
        let Some(d) = self.distance(root, node) else { return Vec::new() };
        let to = match self.kind {
            Kind::Star(_) if d == 0 => (1..n).map(|k| self.at(root, k)).collect(),
            Kind::Star(_) => Vec::new(),
            Kind::Ring if d + 1 == n => Vec::new(),
            Kind::Ring => vec![self.at(root, d + 1)],
            Kind::Heap => (2 * d + 1..(2 * d + 3).min(n)).map(|son| self.at(root, son)).collect(),
            Kind::Path => self.beside(root, d),
        };
        let level = |node: usize| Some(Edge { node, level: self.source(root, node)?.level });
        to.into_iter().filter_map(level).collect()
    }

    /// Of a path: how far from the root, round the ring, its front half begins.
    fn behind(&self) -> usize {
        self.nodes() - self.nodes() / 2
    }

    /// Of a path: the neighbours of the node at distance `d` that are farther from the root.
    fn beside(&self, root: usize, d: usize) -> Vec<usize> {
        let (n, behind) = (self.nodes(), self.behind());
        let mut beside = Vec::new();
        if d + 1 < behind {
            beside.push(self.at(root, d + 1));
        }
        if (d == 0 && n > 1) || d > behind {
            beside.push(self.at(root, (d + n - 1) % n));
        }
        beside
    }

    /// The nodes that a node sends to or receives from, for this root; some may be named twice.
    pub fn neighbours(&self, root: usize, node: usize) -> Vec<usize> {
        if self.kind == Kind::Star(true) {
            return self.order.iter().copied().filter(|x| *x != node).collect();
        }
        let edges = self.towards(root, node).into_iter().chain(self.source(root, node));
        edges.chain(self.before(root, node)).chain(self.after(root, node)).map(|e| e.node).collect()
    }

    /// Whether a node may have several messages of one level for one neighbour.
    pub fn repeats_within_level(&self) -> bool {
        matches!(self.kind, Kind::Heap | Kind::Path)
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
        /// Both ends of every edge know of it, and agree on its level; every node reaches the root, along rising levels.
        #[test]
        fn trees_are_trees_from_both_ends(
            shape in prop::option::of(prop::sample::select(vec![Shape::Direct, Shape::Ring, Shape::Tree])),
            order in (1usize..20).prop_flat_map(|n| Just((0..n).collect::<Vec<_>>()).prop_shuffle()),
            left_out in 0usize..3,
            root in any::<prop::sample::Index>(),
        ) {
            let all = order.len();
            let order = order[..(all - left_out.min(all - 1))].to_vec();
            let (n, first, root) = (order.len(), order[0], order[root.index(order.len())]);
            let forest = shape.map_or(Forest::path(order.clone()), |shape| Forest::new(shape, order.clone()));
            let root = if shape.is_none() { forest.middle() } else { root };
            for node in (0..all).filter(|node| !order.contains(node)) {
                prop_assert!(forest.neighbours(root, node).is_empty());
            }
            if shape.is_none() {
                prop_assert_eq!(forest.neighbours(root, first).len(), if n > 1 { 2 } else { 0 }, "one at the end");
            }
            let mut degree = 0;
            for node in order {
                let up = forest.towards(root, node);
                prop_assert_eq!(up.is_none(), node == root);
                for edge in forest.before(root, node) {
                    prop_assert_eq!(forest.towards(root, edge.node), Some(Edge { node, level: edge.level }));
                    prop_assert!(up.is_none_or(|up| edge.level < up.level));
                    prop_assert!(edge.level < n);
                    degree += 1;
                }
                let from = forest.source(root, node);
                prop_assert_eq!(from.is_none(), node == root);
                for edge in forest.after(root, node) {
                    prop_assert_eq!(forest.source(root, edge.node), Some(Edge { node, level: edge.level }));
                    prop_assert!(from.is_none_or(|from| edge.level > from.level));
                    prop_assert!(edge.level < n);
                    degree += 1;
                }
            }
            prop_assert_eq!(degree, 2 * (n - 1));
        }
    }
}

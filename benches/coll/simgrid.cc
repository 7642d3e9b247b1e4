// Follows the messages of a plan in SimGrid, and prints how long they take, in µs.
//
// SimGrid shares the links among messages (max-min fair, model CM02 without what TCP does). What it
// has no notion of is kept here: which message waits for which step, the order of a lane, how many
// messages of a lane may be under way, and that a message arrives some time after it has left its
// links while the next one flows. crates/collective/simulate/src/messages.rs says what holds.
//
// One unit of SimGrid's time is a µs. The input is what simgrid.py makes of `unbroken plan
// --messages`: numbers with white space between them, in the order in which `read` takes them.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include <simgrid/kernel/Timer.hpp>
#include <simgrid/kernel/resource/Model.hpp>
#include <simgrid/s4u.hpp>

namespace s4u = simgrid::s4u;

struct Message {
  size_t lane, sent_by, received_by;
  uint64_t bytes;
  bool arrived = false;
  s4u::CommPtr comm;
};

struct Lane {
  double alpha_us;
  std::vector<size_t> links, messages;
  s4u::Host *from = nullptr, *to = nullptr;
  // Messages that have begun, that have left their links, that were received.
  size_t begun = 0, flowed = 0, received = 0;
};

struct Step {
  size_t waits = 0;
  bool ready = false, done = false;
  std::vector<size_t> dependents;
  // The message that it sends or receives, counted from 1; 0: none.
  size_t message = 0;
  bool receives = false;
};

static std::vector<double> link_bytes_per_us;
static std::vector<Lane> lanes;
static std::vector<Message> messages;
static std::vector<Step> steps;
// Steps that are done, and whose dependents do not know.
static std::vector<size_t> fresh;
static std::vector<s4u::CommPtr> finished;
static size_t room, steps_done = 0;
static double mean_bytes, ended_us = 0;
// Lanes take turns message by message: each has a part in proportion to its message.
static bool by_message;
static simgrid::kernel::resource::Model* network = nullptr;

template <class T> static T number()
{
  T value;
  if (!(std::cin >> value)) {
    std::fprintf(stderr, "simgrid: the input ends early, or has what is no number\n");
    std::exit(2);
  }
  return value;
}

static void read()
{
  by_message = number<int>() != 0;
  room = number<size_t>();
  link_bytes_per_us.resize(number<size_t>());
  for (double& rate : link_bytes_per_us)
    rate = number<double>();
  lanes.resize(number<size_t>());
  for (Lane& lane : lanes) {
    lane.alpha_us = number<double>();
    lane.links.resize(number<size_t>());
    for (size_t& link : lane.links)
      link = number<size_t>();
  }
  messages.resize(number<size_t>());
  double all = 0;
  for (size_t m = 0; m < messages.size(); m++) {
    messages[m].lane = number<size_t>();
    messages[m].bytes = number<uint64_t>();
    messages[m].sent_by = number<size_t>();
    messages[m].received_by = number<size_t>();
    lanes.at(messages[m].lane).messages.push_back(m);
    all += messages[m].bytes;
  }
  mean_bytes = all / (messages.empty() ? 1 : messages.size());
  steps.resize(number<size_t>());
  for (size_t s = 0; s < steps.size(); s++) {
    steps[s].waits = number<size_t>();
    for (size_t n = 0; n < steps[s].waits; n++)
      steps.at(number<size_t>()).dependents.push_back(s);
  }
  for (size_t m = 0; m < messages.size(); m++) {
    steps.at(messages[m].sent_by).message = m + 1;
    Step& receives = steps.at(messages[m].received_by);
    receives.message = m + 1;
    receives.receives = true;
  }
}

// Each pair of ends that lanes join is a pair of hosts, with a route over the links.
static void build()
{
  s4u::NetZone* zone = s4u::create_full_zone("cluster");
  std::vector<s4u::Link*> links;
  for (size_t l = 0; l < link_bytes_per_us.size(); l++)
    links.push_back(zone->create_link("link" + std::to_string(l), link_bytes_per_us[l]));
  std::map<std::string, s4u::Host*> hosts;
  auto host = [&](const std::string& name) {
    auto [at, is_new] = hosts.try_emplace(name, nullptr);
    if (is_new)
      at->second = zone->create_host(name, 1.0);
    return at->second;
  };
  std::map<std::pair<s4u::Host*, s4u::Host*>, std::vector<size_t>> routes;
  for (Lane& lane : lanes) {
    lane.from = host("from" + std::to_string(lane.links.at(0)));
    lane.to = host("to" + std::to_string(lane.links.at(1)));
    auto [at, is_new] = routes.try_emplace({lane.from, lane.to}, lane.links);
    if (!is_new && at->second != lane.links) {
      std::fprintf(stderr, "simgrid: two lanes join the same ends over different links\n");
      std::exit(2);
    }
    if (!is_new)
      continue;
    std::vector<s4u::LinkInRoute> of_route;
    for (size_t link : lane.links)
      of_route.emplace_back(links.at(link));
    zone->add_route(lane.from->get_netpoint(), lane.to->get_netpoint(), nullptr, nullptr, of_route,
                    false);
  }
  zone->seal();
}

static void finish(size_t step)
{
  if (steps[step].done)
    return;
  steps[step].done = true;
  steps_done++;
  ended_us = s4u::Engine::get_clock();
  fresh.push_back(step);
}

// Begins the lane's next message if it may be sent.
static void try_send(size_t number)
{
  Lane& lane = lanes[number];
  if (lane.begun >= lane.messages.size() || lane.begun != lane.flowed ||
      lane.begun - lane.received >= room)
    return;
  Message& message = messages[lane.messages[lane.begun]];
  if (!steps[message.sent_by].ready)
    return;
  lane.begun++;
  message.comm = s4u::Comm::sendto_init(lane.from, lane.to);
  message.comm->set_payload_size(message.bytes);
  message.comm->set_data(&message);
  message.comm->start();
  if (!by_message)
    return;
  simgrid::kernel::resource::Action& action = network->get_started_action_set()->back();
  if (action.get_cost() != static_cast<double>(message.bytes)) {
    std::fprintf(stderr, "simgrid: the last action is not the message that was begun\n");
    std::exit(2);
  }
  action.set_sharing_penalty(mean_bytes / static_cast<double>(message.bytes));
}

static void try_receive(size_t number)
{
  Lane& lane = lanes[number];
  while (lane.received < lane.messages.size()) {
    Message& message = messages[lane.messages[lane.received]];
    if (!message.arrived || !steps[message.received_by].ready)
      return;
    lane.received++;
    finish(message.received_by);
    try_send(number);
  }
}

static void make_ready(size_t number)
{
  Step& step = steps[number];
  step.ready = true;
  if (step.message == 0)
    finish(number);
  else if (step.receives)
    try_receive(messages[step.message - 1].lane);
  else
    try_send(messages[step.message - 1].lane);
}

// Makes ready what waited for steps that are done.
static void settle()
{
  while (!fresh.empty()) {
    size_t step = fresh.back();
    fresh.pop_back();
    for (size_t next : steps[step].dependents)
      if (--steps[next].waits == 0)
        make_ready(next);
  }
}

static void arrives(Message& message)
{
  message.arrived = true;
  finish(message.sent_by);
  try_receive(message.lane);
  settle();
}

static void has_flowed(s4u::Activity const& activity)
{
  Message& message = *activity.get_data<Message>();
  // It is still in use by who calls.
  finished.clear();
  finished.push_back(std::move(message.comm));
  Lane& lane = lanes[message.lane];
  lane.flowed++;
  if (lane.alpha_us > 0)
    simgrid::kernel::timer::Timer::set(s4u::Engine::get_clock() + lane.alpha_us,
                                       [&message] { arrives(message); });
  try_send(message.lane);
  if (lane.alpha_us <= 0)
    arrives(message);
}

int main(int argc, char** argv)
{
  s4u::Engine engine(&argc, argv);
  // Nothing but what links carry: no latency, no share of a link for acknowledgements, no window.
  for (const char* setting :
       {"network/model:CM02", "network/latency-factor:1", "network/bandwidth-factor:1",
        "network/weight-S:0", "network/TCP-gamma:0", "network/crosstraffic:0"})
    s4u::Engine::set_config(setting);
  read();
  build();
  for (auto* model : engine.get_all_models())
    if (model->get_name().find("etwork") != std::string::npos)
      network = model;
  if (network == nullptr) {
    std::fprintf(stderr, "simgrid: no network model is there\n");
    return 2;
  }
  s4u::Activity::on_completion_cb(has_flowed);
  for (size_t step = 0; step < steps.size(); step++)
    if (steps[step].waits == 0 && !steps[step].ready)
      make_ready(step);
  settle();
  engine.run();
  if (steps_done != steps.size()) {
    std::fprintf(stderr, "simgrid: %zu of %zu steps were done\n", steps_done, steps.size());
    return 2;
  }
  std::printf("%.6f\n", ended_us);
  return 0;
}

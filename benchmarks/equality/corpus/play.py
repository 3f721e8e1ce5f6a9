"""Reinforcement learning: rows are steps of play, with an action, a reward and whether the episode ended."""

import keras
import tensorflow as tf
from keras import layers, ops

from corpus import CLASSES, compiled, dense, program, sgd, steps_of_play


class Agent(keras.Model):
    """A policy and a value of states, whose step is `step(agent, states, actions, rewards, ended)`."""

    def __init__(self, step):
        super().__init__()
        self.policy, self.value, self.target = dense(CLASSES), dense(1), dense(CLASSES)
        self.target.trainable = False
        self.step = step
        self.moving = self.add_weight(shape=(), initializer="zeros", trainable=False, name="moving")
        self.coefficient = self.add_weight(shape=(), initializer="ones", trainable=False, name="coefficient")
        self.alpha = self.add_weight(shape=(), initializer="zeros", name="alpha")

    def call(self, x):
        return self.policy(x) + 0.0 * self.value(x) + 0.0 * self.target(x)

    def train_step(self, data):
        states, y = data
        return self.step(self, states, tf.cast(y[:, 0], tf.int32), y[:, 1], y[:, 2])

    def update(self, loss_of, variables=None):
        variables = variables or self.policy.trainable_variables + self.value.trainable_variables
        with tf.GradientTape() as tape:
            loss = loss_of()
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss


def agent(fn):
    def make():
        return compiled(Agent(fn), optimizer=sgd(0.05))

    make.__name__, make.__module__ = fn.__name__, fn.__module__
    program(steps_of_play)(make)
    return fn


def log_probabilities(model, states, actions):
    logits = model.policy(states)
    return -tf.nn.sparse_softmax_cross_entropy_with_logits(actions, logits), logits


def entropies(logits):
    return -tf.reduce_sum(tf.nn.softmax(logits) * tf.nn.log_softmax(logits), axis=1)


@agent
def reinforce(model, states, actions, rewards, ended):
    def loss():
        log_p, _ = log_probabilities(model, states, actions)
        return -tf.reduce_mean(log_p * rewards)

    return {"loss": model.update(loss, model.policy.trainable_variables)}


@agent
def reinforce_with_the_baseline_of_the_batch(model, states, actions, rewards, ended):
    def loss():
        log_p, _ = log_probabilities(model, states, actions)
        return -tf.reduce_mean(log_p * (rewards - tf.reduce_mean(rewards)))

    return {"loss": model.update(loss, model.policy.trainable_variables)}


@agent
def reinforce_with_a_moving_baseline(model, states, actions, rewards, ended):
    def loss():
        log_p, _ = log_probabilities(model, states, actions)
        return -tf.reduce_mean(log_p * (rewards - model.moving))

    loss = model.update(loss, model.policy.trainable_variables)
    model.moving.assign(0.9 * model.moving + 0.1 * tf.reduce_mean(rewards))
    return {"loss": loss, "baseline": model.moving}


@agent
def reinforce_as_a_sum_over_an_episode(model, states, actions, rewards, ended):
    returns = tf.cumsum(rewards, reverse=True)

    def loss():
        log_p, _ = log_probabilities(model, states, actions)
        return -0.1 * tf.reduce_sum(log_p * returns)

    return {"loss": model.update(loss, model.policy.trainable_variables)}


@agent
def discounted_returns_by_scan(model, states, actions, rewards, ended):
    returns = tf.scan(
        lambda later, now: now[0] + 0.9 * (1 - now[1]) * later, (rewards, ended), initializer=0.0, reverse=True
    )

    def loss():
        log_p, _ = log_probabilities(model, states, actions)
        return -tf.reduce_mean(log_p * returns)

    return {"loss": model.update(loss, model.policy.trainable_variables)}


@agent
def advantage_actor_critic(model, states, actions, rewards, ended):
    def loss():
        log_p, logits = log_probabilities(model, states, actions)
        values = model.value(states)[:, 0]
        advantages = tf.stop_gradient(rewards - values)
        policy = -tf.reduce_mean(log_p * advantages)
        value = tf.reduce_mean(tf.square(rewards - values))
        return policy + 0.5 * value - 0.01 * tf.reduce_mean(entropies(logits))

    return {"loss": model.update(loss)}


@agent
def advantages_normalized(model, states, actions, rewards, ended):
    def loss():
        log_p, _ = log_probabilities(model, states, actions)
        values = model.value(states)[:, 0]
        advantages = tf.stop_gradient(rewards - values)
        advantages = (advantages - ops.mean(advantages)) / (ops.std(advantages) + 1e-1)
        return -ops.mean(log_p * advantages) + ops.mean(ops.square(rewards - values))

    return {"loss": model.update(loss)}


@agent
def generalized_advantages(model, states, actions, rewards, ended):
    values = model.value(states)[:, 0]
    following = tf.concat([values[1:], [0.0]], 0)
    deltas = rewards + 0.9 * (1 - ended) * following - values
    _, advantages = tf.scan(
        lambda later, now: (0.0, now[0] + 0.8 * (1 - now[1]) * later[1]),
        (deltas, ended),
        initializer=(0.0, 0.0),
        reverse=True,
    )

    def loss():
        log_p, _ = log_probabilities(model, states, actions)
        return -tf.reduce_mean(log_p * tf.stop_gradient(advantages))

    return {"loss": model.update(loss, model.policy.trainable_variables)}


def clipped_loss(model, states, actions, advantages, old):
    log_p, logits = log_probabilities(model, states, actions)
    ratio = tf.exp(log_p - old)
    clipped = tf.clip_by_value(ratio, 0.8, 1.2)
    return -tf.reduce_mean(tf.minimum(ratio * advantages, clipped * advantages)) - 0.01 * tf.reduce_mean(
        entropies(logits)
    )


@agent
def ppo_over_all_rows(model, states, actions, rewards, ended):
    old, _ = log_probabilities(model, states, actions)
    for _ in range(3):
        loss = model.update(
            lambda: clipped_loss(model, states, actions, rewards, old), model.policy.trainable_variables
        )
    return {"loss": loss}


@agent
def ppo_in_minibatches(model, states, actions, rewards, ended):
    old, _ = log_probabilities(model, states, actions)
    half = tf.shape(states)[0] // 2 + 1
    for part in (slice(None, half), slice(half - 1, None)):
        loss = model.update(
            lambda part=part: clipped_loss(model, states[part], actions[part], rewards[part], old[part]),
            model.policy.trainable_variables,
        )
    return {"loss": loss}


@agent
def ppo_in_shuffled_minibatches(model, states, actions, rewards, ended):
    old, _ = log_probabilities(model, states, actions)
    for epoch in range(2):
        order = tf.random.experimental.stateless_shuffle(tf.range(tf.shape(states)[0]), seed=(epoch, 7))
        for chosen in (order[::2], order[: tf.shape(order)[0] // 2 + 1]):
            parts = [tf.gather(each, chosen) for each in (states, actions, rewards, old)]
            loss = model.update(lambda parts=parts: clipped_loss(model, *parts), model.policy.trainable_variables)
    return {"loss": loss}


@agent
def ppo_with_gradients_clipped(model, states, actions, rewards, ended):
    old, _ = log_probabilities(model, states, actions)
    variables = model.policy.trainable_variables
    with tf.GradientTape() as tape:
        loss = clipped_loss(model, states, actions, rewards, old)
    gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, variables), 0.1)
    model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return {"loss": loss, "norm": norm}


@agent
def ppo_that_stops_by_the_divergence(model, states, actions, rewards, ended):
    old, _ = log_probabilities(model, states, actions)
    variables = model.policy.trainable_variables
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = clipped_loss(model, states, actions, 3.0 * rewards, old)
        now, _ = log_probabilities(model, states, actions)
        go_on = tf.cast(tf.reduce_mean(old - now) < 0.001, tf.float32)
        gradients = [go_on * g for g in tape.gradient(loss, variables)]
        model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return {"loss": loss}


@agent
def penalty_adapted_to_the_divergence(model, states, actions, rewards, ended):
    old, before = log_probabilities(model, states, actions)

    def loss():
        log_p, logits = log_probabilities(model, states, actions)
        kl = tf.reduce_mean(
            tf.reduce_sum(tf.nn.softmax(before) * (tf.nn.log_softmax(before) - tf.nn.log_softmax(logits)), 1)
        )
        return -tf.reduce_mean(tf.exp(log_p - old) * rewards) + model.coefficient * kl

    loss = model.update(loss, model.policy.trainable_variables)
    _, after = log_probabilities(model, states, actions)
    kl = tf.reduce_mean(
        tf.reduce_sum(tf.nn.softmax(before) * (tf.nn.log_softmax(before) - tf.nn.log_softmax(after)), 1)
    )
    model.coefficient.assign(tf.where(kl > 1e-3, 2.0 * model.coefficient.value, 0.5 * model.coefficient.value))
    return {"loss": loss, "kl": kl}


def td_targets(model, states, rewards, ended):
    return rewards + 0.9 * (1 - ended) * tf.reduce_max(model.target(states * 0.9), axis=1)


@agent
def deep_q(model, states, actions, rewards, ended):
    targets = td_targets(model, states, rewards, ended)

    def loss():
        q = tf.reduce_sum(model.policy(states) * tf.one_hot(actions, CLASSES), axis=1)
        return keras.losses.Huber()(targets, q)

    loss = model.update(loss, model.policy.trainable_variables)
    for old, new in zip(model.target.variables, model.policy.variables, strict=True):
        old.assign(0.9 * old + 0.1 * new)
    return {"loss": loss}


@agent
def deep_q_with_a_target_copied_at_times(model, states, actions, rewards, ended):
    targets = td_targets(model, states, rewards, ended)

    def loss():
        q = tf.gather(model.policy(states), actions, axis=1, batch_dims=1)
        return tf.reduce_mean(tf.square(targets - q))

    loss = model.update(loss, model.policy.trainable_variables)
    copied = tf.cast(tf.equal(model.optimizer.iterations % 2, 0), tf.float32)
    for old, new in zip(model.target.variables, model.policy.variables, strict=True):
        old.assign(copied * new + (1 - copied) * old)
    return {"loss": loss}


@agent
def double_q_by_gather_nd(model, states, actions, rewards, ended):
    rows = tf.range(tf.shape(states)[0])
    best = tf.argmax(model.policy(states * 0.9), 1, output_type=tf.int32)
    following = tf.gather_nd(model.target(states * 0.9), tf.stack([rows, best], 1))

    def loss():
        q = tf.gather_nd(model.policy(states), tf.stack([rows, actions], 1))
        return tf.reduce_mean(tf.square(rewards + 0.9 * (1 - ended) * following - q))

    return {"loss": model.update(loss, model.policy.trainable_variables)}


@agent
def weights_of_prioritized_replay(model, states, actions, rewards, ended):
    weights = tf.pow(tf.abs(rewards) + 0.1, -0.5)
    weights /= tf.reduce_max(weights)

    def loss():
        q = tf.reduce_sum(model.policy(states) * tf.one_hot(actions, CLASSES), axis=1)
        return tf.reduce_mean(weights * tf.square(td_targets(model, states, rewards, ended) - q))

    return {"loss": model.update(loss, model.policy.trainable_variables)}


@agent
def conservative_q(model, states, actions, rewards, ended):
    def loss():
        q = model.policy(states)
        chosen = tf.reduce_sum(q * tf.one_hot(actions, CLASSES), axis=1)
        penalty = tf.reduce_mean(tf.reduce_logsumexp(q, 1)) - tf.reduce_mean(chosen)
        return tf.reduce_mean(tf.square(rewards - chosen)) + 0.1 * penalty

    return {"loss": model.update(loss, model.policy.trainable_variables)}


@agent
def soft_actor_critic_temperature(model, states, actions, rewards, ended):
    if not model.optimizer.built:  # for all that it updates in turn
        model.optimizer.build(model.trainable_variables)

    def loss():
        log_p, logits = log_probabilities(model, states, actions)
        return -tf.reduce_mean(log_p * rewards) - tf.exp(model.alpha) * tf.reduce_mean(entropies(logits))

    loss = model.update(loss, model.policy.trainable_variables)
    _, logits = log_probabilities(model, states, actions)
    entropy = tf.stop_gradient(tf.reduce_mean(entropies(logits)))
    return {"loss": loss, "alpha": model.update(lambda: tf.exp(model.alpha) * (entropy - 0.5), [model.alpha])}


@agent
def rewards_of_chosen_actions_alone(model, states, actions, rewards, ended):
    """The mean over the rows that took an action."""
    took = tf.where(tf.equal(actions, 1))[:, 0]

    def loss():
        log_p, _ = log_probabilities(model, tf.gather(states, took), tf.gather(actions, took))
        return tf.math.divide_no_nan(
            -tf.reduce_sum(log_p * tf.gather(rewards, took)), tf.cast(tf.size(took), tf.float32)
        )

    return {"loss": model.update(loss, model.policy.trainable_variables)}


@agent
def values_of_ended_rows_masked(model, states, actions, rewards, ended):
    alive = 1.0 - ended

    def loss():
        errors = tf.square(rewards - model.value(states)[:, 0])
        return tf.reduce_sum(alive * errors) / tf.reduce_sum(alive)

    return {"loss": model.update(loss, model.value.trainable_variables)}


@agent
def group_relative_policy(model, states, actions, rewards, ended):
    """Rewards are compared within the group of rows of one action."""
    means = tf.math.unsorted_segment_mean(rewards, actions, CLASSES)
    advantages = rewards - tf.gather(means, actions)

    def loss():
        log_p, _ = log_probabilities(model, states, actions)
        return -tf.reduce_mean(log_p * advantages)

    return {"loss": model.update(loss, model.policy.trainable_variables)}


@agent
def cross_entropy_method(model, states, actions, rewards, ended):
    """The rows of the highest rewards are imitated."""
    elite = tf.where(rewards >= ops.quantile(rewards, 0.5))[:, 0]

    def loss():
        log_p, _ = log_probabilities(model, tf.gather(states, elite), tf.gather(actions, elite))
        return -tf.reduce_mean(log_p)

    return {"loss": model.update(loss, model.policy.trainable_variables)}


@agent
def advantage_weighted_regression(model, states, actions, rewards, ended):
    weights = tf.nn.softmax(rewards)

    def loss():
        log_p, _ = log_probabilities(model, states, actions)
        return -tf.reduce_sum(weights * log_p)

    return {"loss": model.update(loss, model.policy.trainable_variables)}


@agent
def rewards_normalized_by_a_running_deviation(model, states, actions, rewards, ended):
    model.moving.assign(0.9 * model.moving + 0.1 * tf.reduce_mean(tf.square(rewards)))

    def loss():
        log_p, _ = log_probabilities(model, states, actions)
        return -tf.reduce_mean(log_p * rewards / tf.sqrt(model.moving.value + 0.1))

    return {"loss": model.update(loss, model.policy.trainable_variables)}


@program(steps_of_play)
def trust_region_by_two_passes():
    """A natural gradient: the product of the Fisher matrix and the gradient, by a tape in a tape."""

    class Natural(keras.Model):
        def __init__(self):
            super().__init__()
            self.policy = layers.Dense(CLASSES)

        def call(self, x):
            return self.policy(x)

        def train_step(self, data):
            states, y = data
            actions, rewards = tf.cast(y[:, 0], tf.int32), y[:, 1]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(
                    rewards * tf.nn.sparse_softmax_cross_entropy_with_logits(actions, self.policy(states))
                )
            [g, _] = tape.gradient(loss, self.policy.trainable_variables)
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    logits = self.policy(states)
                    old = tf.stop_gradient(tf.nn.softmax(logits))
                    kl = -tf.reduce_mean(tf.reduce_sum(old * tf.nn.log_softmax(logits), 1))
                product = tf.reduce_sum(inner.gradient(kl, self.policy.kernel) * g)
            curved = outer.gradient(product, self.policy.kernel)
            rate = tf.reduce_sum(g * g) / (tf.reduce_sum(g * curved) + 1.0)
            self.policy.kernel.assign_sub(rate * g)
            return {"loss": loss, "rate": rate}

    return compiled(Natural())

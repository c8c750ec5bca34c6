package kernels

import (
	"errors"
	"math/rand/v2"
	"slices"
)

// program is the ranks that run a form's program in a simulation.
type program interface {
	// begin begins a run of a rank, whose user has written the input, and wants nothing of the last result any more.
	begin(rank, run int)
	// step does a step of a rank's run, and says whether it did one, or waits, and whether the run has ended with it.
	step(rank int) (moved, ended bool)
	// check says what of a rank's result of a run is not as it should be.
	check(rank, run int) error
}

// simulate lets every one of size ranks run a program runs times, in random orders, some of them a few steps ahead of others. It fails where everybody waits for somebody else, and with what check
// says.
func simulate(random *rand.Rand, size, runs int, p program) error {
	done := make([]int, size)
	for rank := range size {
		p.begin(rank, 0)
	}
	for slices.Min(done) < runs {
		anybody := false
		for _, rank := range random.Perm(size) {
			for range 1 + random.IntN(12) {
				if done[rank] == runs {
					break
				}
				moved, ended := p.step(rank)
				if !moved {
					break
				}
				anybody = true
				if !ended {
					continue
				}
				if err := p.check(rank, done[rank]); err != nil {
					return err
				}
				if done[rank]++; done[rank] < runs {
					p.begin(rank, done[rank])
				}
			}
		}
		if !anybody {
			return errors.New("every rank waits for another")
		}
	}
	return nil
}

// runStream says on which of a run's two streams a step is, or that it lets one wait for the other.
type runStream uint8

const (
	onPlan runStream = iota // the stream that the run was enqueued on
	onLane
	forks // the lane waits for the plan's stream
	joins // the plan's stream waits for the lane
)

// behind says which of a run's steps each one comes behind: those of one stream in order, and what forks and joins say.
func behind(steps int, streamOf func(step int) runStream) [][]int {
	after := make([][]int, steps)
	var plan, lane []int // what the next step of each comes behind
	for i := range after {
		switch streamOf(i) {
		case onPlan:
			after[i], plan = plan, []int{i}
		case onLane:
			after[i], lane = lane, []int{i}
		case forks:
			after[i], lane = plan, append(slices.Clip(lane), i)
		case joins:
			after[i], plan = lane, append(slices.Clip(plan), i)
		}
	}
	return after
}

// ready is the steps of a run that are not done, and come behind nothing that is not.
func ready(after [][]int, done []bool) (steps []int) {
	for i := range after {
		if !done[i] && !slices.ContainsFunc(after[i], func(on int) bool { return !done[on] }) {
			steps = append(steps, i)
		}
	}
	return steps
}

// queue puts the steps of a run into one order, as far out of theirs as after allows.
func queue(random *rand.Rand, after [][]int) (order []int) {
	done := make([]bool, len(after))
	for range after {
		steps := ready(after, done)
		i := steps[random.IntN(len(steps))]
		switch random.IntN(3) { // the worst orders are those of one stream as far ahead of the other as it can be
		case 0:
			i = steps[0]
		case 1:
			i = steps[len(steps)-1]
		}
		done[i] = true
		order = append(order, i)
	}
	return order
}

// sendNext takes one of the peers that a send has not done with: left, or all peers if none is, as it begins. Each is told when what is for it has come, or at once if nothing is, while what is
// for others may still be on its way. The send has ended when none is left.
func sendNext(random *rand.Rand, left, peers []int) (to int, rest []int) {
	if len(left) == 0 {
		left = slices.Clone(peers)
	}
	i := random.IntN(len(left))
	to = left[i]
	return to, slices.Delete(left, i, i+1)
}

// peersOf is all ranks of so many but one.
func peersOf(rank, size int) (all []int) {
	for k := 1; k < size; k++ {
		all = append(all, (rank+k)%size)
	}
	return all
}

package group

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"

	"github.com/symmem/symmem/group/durable"
)

// verb is what a store request does.
type verb int

const (
	verbSet verb = iota + 1
	verbGet
	verbTryGet
	verbAdd
	verbCompareAndSwap
	verbDelete
)

// String returns the word that errors use.
func (v verb) String() string {
	switch v {
	case verbSet:
		return "set"
	case verbGet:
		return "get"
	case verbTryGet:
		return "try-get"
	case verbAdd:
		return "add"
	case verbCompareAndSwap:
		return "compare-and-swap"
	case verbDelete:
		return "delete"
	}
	return fmt.Sprintf("verb(%d)", int(v))
}

// storeRequest asks for one thing of a group's store. Its slices are not changed any more.
type storeRequest struct {
	id      uint64 // unique among the rank's requests that are under way
	verb    verb
	key     string
	value   []byte // set, compare-and-swap: the new value
	old     []byte // compare-and-swap: the expected value
	hasOld  bool   // compare-and-swap: false if the key is expected to be absent
	delta   int64  // add
	replyTo storeReceiver
}

// storeReply answers a storeRequest. Its value is not changed any more.
type storeReply struct {
	id      uint64
	value   []byte // get, try-get; compare-and-swap: what is there now
	found   bool   // whether value is one; delete: whether there was one; compare-and-swap: see swapped
	swapped bool
	number  int64 // add: the sum
	failure *failure
}

// storeReceiver takes the reply to a store request, at most once.
type storeReceiver interface {
	receiveReply(r *storeReply)
}

// getWaiter is a Get whose key nobody has set yet.
type getWaiter struct {
	worldRank int
	id        uint64
	to        storeReceiver
}

// request does what req asks for, for one rank in one group. A Get of an absent key is answered when the key is set.
func (h *hub) request(worldRank int, group string, req *storeRequest) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if kept := h.ranks[worldRank].replies[req.id]; kept != nil { // an earlier service has done it
		h.reply(req.replyTo, kept)
		return
	}
	reply := &storeReply{id: req.id}
	g := h.groups[group]
	switch {
	case g == nil:
		reply.failure = &failure{kind: failClosed}
	case g.rankOf(worldRank) < 0:
		reply.failure = &failure{kind: failInvalid, text: fmt.Sprintf("world rank %d is no member of group %s", worldRank, group)}
	case g.away[g.rankOf(worldRank)]:
		reply.failure = &failure{kind: failClosed}
	default:
		if reply.failure = h.untaken(worldRank, req.verb); reply.failure != nil {
			break
		}
		if reply = h.do(g, req, reply); reply != nil {
			h.keepRequest(worldRank, g, req, reply)
			break
		}
		if h.ranks[worldRank].gets < h.limits.gets {
			h.ranks[worldRank].gets++
			g.waiting[req.key] = append(g.waiting[req.key], getWaiter{worldRank: worldRank, id: req.id, to: req.replyTo})
			return
		}
		reply = &storeReply{id: req.id, failure: &failure{kind: failQuota, text: quotaGets, limit: int64(h.limits.gets)}}
	}
	h.reply(req.replyTo, reply)
}

// keepRequest keeps what a request has changed, together with its reply, and then answers the Gets that waited for it.
func (h *hub) keepRequest(worldRank int, g *hubGroup, req *storeRequest, reply *storeReply) {
	if h.keeper != nil && reply.failure == nil {
		change := remove(valueKey(g.name, req.key))
		if value, ok := g.store[req.key]; ok {
			change = durable.Change{Key: change.Key, Value: value}
		}
		changed := true
		switch req.verb {
		case verbDelete:
			changed = reply.found
		case verbCompareAndSwap:
			changed = reply.swapped
		case verbGet, verbTryGet:
			changed = false
		case verbSet, verbAdd:
		}
		if changed {
			h.ranks[worldRank].keepReply(reply)
			h.keeper.keep(change, put(replyKey(worldRank, req.id), replyToWire(reply)))
		}
	}
	for _, w := range h.woken {
		h.reply(w.to, &storeReply{id: w.id, value: g.store[req.key], found: true})
	}
	h.woken = nil
}

// do fills in the reply, or returns nil if the rank must wait.
func (h *hub) do(g *hubGroup, req *storeRequest, reply *storeReply) *storeReply {
	present, ok := g.store[req.key]
	switch req.verb {
	case verbSet:
		reply.failure = h.put(g, req.key, req.value)
	case verbGet:
		if !ok && g.lost == nil {
			return nil
		}
		if !ok { // whoever would set it may be the one that is lost
			reply.failure = &failure{kind: failLost, lost: g.lost}
		}
		reply.value, reply.found = present, ok
	case verbTryGet:
		reply.value, reply.found = present, ok
	case verbAdd:
		sum, err := addTo(present, ok, req.delta)
		if err != nil {
			reply.failure = &failure{kind: failInvalid, text: err.Error()}
			break
		}
		reply.failure = h.put(g, req.key, strconv.AppendInt(nil, sum, 10))
		reply.number = sum
	case verbCompareAndSwap:
		if ok == req.hasOld && bytes.Equal(present, req.old) {
			if reply.failure = h.put(g, req.key, req.value); reply.failure != nil {
				break
			}
			present, ok, reply.swapped = req.value, true, true
		}
		reply.value, reply.found = present, ok
	case verbDelete:
		if ok {
			delete(g.store, req.key)
			h.keys--
			h.storeBytes -= int64(len(req.key) + len(present))
		}
		reply.found = ok
	default:
		reply.failure = &failure{kind: failInvalid, text: fmt.Sprintf("the store knows no %v", req.verb)}
	}
	return reply
}

// addTo returns the number that value spells plus delta; an absent value is 0.
func addTo(value []byte, ok bool, delta int64) (int64, error) {
	if !ok {
		return delta, nil
	}
	n, err := strconv.ParseInt(string(value), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("the value is no decimal number that Add could add to: %w", err)
	}
	sum := n + delta
	if (sum > n) != (delta > 0) && delta != 0 {
		return 0, fmt.Errorf("%d + %d does not fit in 64 bits", n, delta)
	}
	return sum, nil
}

// put stores the value and wakes those who wait for it, or returns a failure that names the quota that forbids it.
func (h *hub) put(g *hubGroup, key string, value []byte) *failure {
	if value == nil {
		value = []byte{}
	}
	keys, size := h.keys, h.storeBytes+int64(len(key)+len(value))
	if old, ok := g.store[key]; ok {
		size -= int64(len(key) + len(old))
	} else {
		keys++
	}
	switch {
	case keys > h.limits.keys:
		return &failure{kind: failQuota, text: quotaKeys, limit: int64(h.limits.keys)}
	case size > h.limits.storeBytes && size > h.storeBytes: // what makes the store smaller is always allowed
		return &failure{kind: failQuota, text: quotaStoreBytes, limit: h.limits.storeBytes}
	}
	h.keys, h.storeBytes = keys, size
	g.store[key] = value
	for _, w := range g.waiting[key] {
		h.ranks[w.worldRank].gets--
	}
	h.woken = g.waiting[key]
	delete(g.waiting, key)
	return nil
}

// cancelGet withdraws a waiting Get, which then gets no answer.
func (h *hub) cancelGet(worldRank int, group, key string, id uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if g := h.groups[group]; g != nil {
		h.removeWaiters(g, key, func(w getWaiter) bool { return w.worldRank == worldRank && w.id == id })
	}
}

// dropWaiters withdraws every waiting Get of a rank that is gone.
func (h *hub) dropWaiters(g *hubGroup, worldRank int) {
	for key := range g.waiting {
		h.removeWaiters(g, key, func(w getWaiter) bool { return w.worldRank == worldRank })
	}
}

func (h *hub) removeWaiters(g *hubGroup, key string, gone func(getWaiter) bool) {
	rest := slices.DeleteFunc(g.waiting[key], func(w getWaiter) bool {
		if !gone(w) {
			return false
		}
		h.ranks[w.worldRank].gets--
		return true
	})
	if len(rest) == 0 {
		delete(g.waiting, key)
	} else {
		g.waiting[key] = rest
	}
}

// failWaiters answers every waiting Get of the group with f.
func (h *hub) failWaiters(g *hubGroup, f *failure) {
	for key, waiters := range g.waiting {
		for _, w := range waiters {
			h.ranks[w.worldRank].gets--
			h.reply(w.to, &storeReply{id: w.id, failure: f})
		}
		delete(g.waiting, key)
	}
}

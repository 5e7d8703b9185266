// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"crypto/sha256"
	"net/http"
	"time"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

const (
	keyHeader = "Idempotency-Key"
	keyMax    = 255
)

// repeatable is a request that came with an Idempotency-Key. There is one for each command that was started with a key
// and is still remembered, so the commands' bound is theirs.
type repeatable struct {
	key     string
	sum     [sha256.Size]byte // of the request, in our own words: spaces and the order of fields do not count
	at      time.Time
	started chan struct{} // closed when command is set or the attempt has failed
	command *Command      // nil: it failed, and the next one tries
}

// keyOf reads the request's key; empty: none.
func keyOf(req *http.Request) (string, error) {
	keys := req.Header.Values(keyHeader)
	if len(keys) == 0 {
		return "", nil
	}
	key := keys[0]
	good := len(keys) == 1 && key != "" && len(key) <= keyMax
	for i := range len(key) {
		good = good && key[i] >= ' ' && key[i] <= '~'
	}
	if !good {
		return "", invalid("%s must be one to %d printable ASCII characters, once.", keyHeader, keyMax)
	}
	return key, nil
}

// RunOnce is Run for a request that may come several times with the same key: only the first starts a command, and all
// get that one.
func (r *Runner) RunOnce(ctx context.Context, key string, req *wire.RunCommandRequest, by Caller) (*Command, error) {
	if key == "" {
		return r.Run(req, by)
	}
	text, err := reply.Marshal(req) // maps come in the order of their keys
	if err != nil {
		return nil, err
	}
	mine := &repeatable{key: key, sum: sha256.Sum256(text), at: time.Now(), started: make(chan struct{})}
	for {
		first := r.claim(mine)
		if first == mine {
			return r.runClaimed(mine, req, by)
		}
		if first.sum != mine.sum {
			return nil, reply.Errorf(wire.CodeGeneralIdempotencyMismatch, "This %s came before with another request body.", keyHeader)
		}
		select {
		case <-first.started:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if first.command != nil {
			return first.command, nil
		}
	}
}

// claim enters a request, unless another one with its key is there; it gives the one that is.
func (r *Runner) claim(mine *repeatable) *repeatable {
	r.mu.Lock()
	defer r.mu.Unlock()
	if first := r.keys[mine.key]; first != nil && mine.at.Sub(first.at) < keepFor {
		return first
	}
	if r.keys == nil {
		r.keys = map[string]*repeatable{}
	}
	r.keys[mine.key] = mine
	return mine
}

func (r *Runner) runClaimed(mine *repeatable, req *wire.RunCommandRequest, by Caller) (*Command, error) {
	c, err := r.Run(req, by)
	r.mu.Lock()
	if err != nil {
		r.disclaim(mine)
	} else {
		mine.command, c.claim = c, mine
		if r.commands[c.rec.ID] != c { // many others have pushed it out meanwhile
			r.disclaim(mine)
		}
	}
	r.mu.Unlock()
	close(mine.started)
	return c, err
}

// disclaim forgets a key. Called with the lock held.
func (r *Runner) disclaim(one *repeatable) {
	if one != nil && r.keys[one.key] == one {
		delete(r.keys, one.key)
	}
}

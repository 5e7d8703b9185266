// SPDX-License-Identifier: Apache-2.0

package pty

import (
	"sync"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/command"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

const viewersMax = 16

// terminal is one of the API's: a place for one program at a time, its output, and those who look at it.
type terminal struct {
	api  *API
	id   string
	body wire.CreatePtyRequest

	mu      sync.Mutex
	changed chan struct{} // closed, and made anew, when there is output or an end
	output  ring
	run     *program // nil before the first
	running bool
	code    int    // of the program that ran last
	signal  string // that ended it
	told    bool   // a client has heard of that end
	holder  *guest // the one who may type
	viewers int
	deleted bool
	ended   sync.WaitGroup // the goroutine of the program, and the guests
}

// guest is a connected client.
type guest struct {
	viewer  bool
	evicted chan struct{} // closed when another takes its place
}

func (t *terminal) wake() {
	close(t.changed)
	t.changed = make(chan struct{})
}

// sink gets the program's output. It never waits for a client.
func (t *terminal) sink(s command.Stream, data []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.output.write(s, data)
	t.wake()
}

// admit takes a place, and starts the program for one who may type. The guest leaves with leave.
func (t *terminal) admit(viewer, takeover bool, mode wire.PtyMode) (*guest, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	g := &guest{viewer: viewer, evicted: make(chan struct{})}
	switch {
	case t.deleted:
		return nil, notFound(t.id)
	case viewer && t.viewers >= viewersMax:
		return nil, reply.Errorf(wire.CodeResourceExhausted, "%d viewers look at this terminal, more are not possible.", viewersMax)
	case viewer:
		t.viewers++
		t.ended.Add(1)
		return g, nil
	case t.holder != nil && !takeover:
		return nil, reply.Errorf(wire.CodeAlreadyConnected, "Another client is connected to this terminal.")
	}
	// One that reconnects learns how the program ended; after that it is started anew.
	if t.run == nil || !t.running && t.told {
		if err := t.start(mode); err != nil {
			return nil, err
		}
	}
	if t.holder != nil {
		close(t.holder.evicted)
	}
	t.holder = g
	t.ended.Add(1)
	return g, nil
}

func (t *terminal) leave(g *guest) {
	t.vacate(g)
	t.mu.Lock()
	if g.viewer {
		t.viewers--
	}
	t.mu.Unlock()
	t.ended.Done()
}

// vacate gives up the place of the one client that types.
func (t *terminal) vacate(g *guest) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.holder == g {
		t.holder = nil
	}
}

// start runs the program. Called with the lock held.
func (t *terminal) start(mode wire.PtyMode) error {
	p, err := t.api.program(&t.body)
	if err != nil {
		return err
	}
	defer p.Close()
	var run *program
	err = unix.ENOENT
	if p.Spec.Path != "" {
		run, err = start(t.api.Spawner, p, mode, t.body.Cols, t.body.Rows, t.sink)
	}
	if err != nil {
		return command.StartFault("The terminal's program", p.Spec.Args[0], err)
	}
	t.run, t.running, t.told = run, true, false
	t.ended.Go(func() {
		code, signal := run.wait()
		t.mu.Lock()
		defer t.mu.Unlock()
		t.running, t.code, t.signal = false, code, signal
		t.wake()
	})
	return nil
}

// end kills the program and waits until all clients have heard of it.
func (t *terminal) end() {
	t.mu.Lock()
	t.deleted = true
	run, running := t.run, t.running
	t.wake()
	t.mu.Unlock()
	if running {
		run.kill()
	}
	t.ended.Wait()
}

func (t *terminal) info() wire.Pty {
	t.mu.Lock()
	defer t.mu.Unlock()
	connected, viewers := t.holder != nil, t.viewers
	p := wire.Pty{SessionID: t.id, Running: t.running, OutputOffset: t.output.end, Connected: &connected, Viewers: &viewers}
	if t.run != nil {
		p.Mode = t.run.mode
		if !t.running {
			code := t.code
			p.ExitCode = &code
		}
	}
	return p
}

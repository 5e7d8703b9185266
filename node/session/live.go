// SPDX-License-Identifier: Apache-2.0

package session

import (
	"errors"
	"os"

	"opensandbox.io/node/command"
	"opensandbox.io/node/spawn"
	"opensandbox.io/node/wire"
)

// Live is one shell that stays, for packages that keep and record its runs themselves. Close it when its process has
// ended.
type Live struct{ shell *shell }

// Start runs a shell of bash, its streams apart. Output goes to sink, in the order of each stream.
func Start(spawner *spawn.Spawner, runner *command.Runner, cwd string, envs map[string]string, sink func(command.Stream, []byte)) (*Live, error) {
	p, err := runner.Program(&wire.RunCommandRequest{Argv: bash.argv, Cwd: cwd, Envs: envs})
	if err != nil {
		return nil, err
	}
	defer p.Close()
	if p.Spec.Path == "" {
		return nil, os.ErrNotExist
	}
	s, err := start(spawner, p, &bash, sink)
	if err != nil {
		return nil, err
	}
	return &Live{s}, nil
}

// Process is the shell's.
func (l *Live) Process() *spawn.Process { return l.shell.proc }

// Send hands the shell what to run; the channel gets its exit status. Before it the last one must have ended.
func (l *Live) Send(text string) (<-chan int, error) {
	select {
	case <-l.shell.proc.Done():
		return nil, errors.New("the shell has ended")
	default:
	}
	return l.shell.send("", text, true)
}

// Interrupt ends the programs of a run that began at a moment and makes the shell skip its rest; false: it does not.
func (l *Live) Interrupt(began spawn.Moment, answers <-chan int, gone <-chan struct{}) bool {
	return l.shell.interrupt(began, answers, gone)
}

// Drain moves what has been written so far to the sink.
func (l *Live) Drain() { l.shell.drain() }

// Settle waits until what has been read is in the sink.
func (l *Live) Settle() {
	for _, p := range l.shell.pumps {
		p.Settle()
	}
}

// Forget drops the text of a run that has ended.
func (l *Live) Forget() { l.shell.forget() }

// Close gives everything back.
func (l *Live) Close() { l.shell.close() }

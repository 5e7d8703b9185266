// SPDX-License-Identifier: Apache-2.0

package code

import (
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/session"
	"opensandbox.io/node/spawn"
)

// bashContext is the kernel of a context of bash: the shell of a session, whose answers are put into the words of
// kernels.
type bashContext struct {
	shell *session.Live
	said  chan message
	stop  chan struct{}
	runs  sync.WaitGroup

	mu         sync.Mutex
	interrupts chan struct{} // of the cell that runs
}

func (a *API) startBash(c *codeContext, cwd string, envs map[string]string) (kernel, string, error) {
	dir, err := a.Runner.Path(cwd)
	if err != nil {
		return nil, "", err
	}
	live, err := session.Start(a.Spawner, a.Runner, cwd, envs, c.output)
	if err != nil {
		return nil, "", err
	}
	return &bashContext{shell: live, said: make(chan message), stop: make(chan struct{})}, dir, nil
}

func (k *bashContext) start(count int, code string, envs map[string]string) error {
	texts := []string{code}
	if len(envs) > 0 {
		// In a run of its own, so that the lines of the cell keep their numbers.
		var text strings.Builder
		for name, value := range envs {
			text.WriteString("builtin export " + name + "='" + strings.ReplaceAll(value, "'", `'\''`) + "';")
		}
		texts = []string{text.String(), code}
	}
	interrupts := make(chan struct{}, 1)
	k.mu.Lock()
	k.interrupts = interrupts
	k.mu.Unlock()
	k.runs.Go(func() {
		for i, text := range texts {
			last := i == len(texts)-1
			problem, ended := k.run(text, interrupts)
			if !ended {
				return // the shell has, which is seen elsewhere
			}
			if problem != nil && (last || problem.Ename != nameExit) {
				problem.Count = count
				k.say(*problem)
				last = true
			}
			if last {
				k.say(message{Type: "done", Count: count})
				return
			}
		}
	})
	return nil
}

// run hands the shell something and waits for its end.
func (k *bashContext) run(text string, interrupts <-chan struct{}) (problem *message, ended bool) {
	began := spawn.Now(k.pid())
	answers, err := k.shell.Send(text)
	if err != nil {
		k.kill() // it cannot be used any more
		return nil, false
	}
	defer k.shell.Forget()
	for {
		select {
		case status := <-answers:
			if status == 0 {
				return nil, true
			}
			text := strconv.Itoa(status)
			return &message{Type: "error", Ename: nameExit, Evalue: text, Traceback: []string{"exit status " + text}}, true
		case <-interrupts:
			if k.shell.Interrupt(began, answers, k.stop) {
				text := "The cell was interrupted."
				return &message{Type: "error", Ename: "KeyboardInterrupt", Evalue: text, Traceback: []string{text}}, true
			}
			k.kill() // bash has no way out of a loop whose every command is skipped
		case <-k.shell.Process().Done():
			return nil, false
		case <-k.stop:
			return nil, false
		}
	}
}

func (k *bashContext) say(m message) {
	select {
	case k.said <- m:
	case <-k.stop:
	}
}

func (k *bashContext) interrupt() {
	k.mu.Lock()
	defer k.mu.Unlock()
	select {
	case k.interrupts <- struct{}{}:
	default:
	}
}

func (k *bashContext) lines() <-chan message  { return k.said }
func (k *bashContext) drain()                 { k.shell.Drain() }
func (k *bashContext) settle()                { k.shell.Settle() }
func (k *bashContext) ended() <-chan struct{} { return k.shell.Process().Done() }
func (k *bashContext) pid() int               { return k.shell.Process().Pid }

func (k *bashContext) status() (syscall.WaitStatus, bool) {
	select {
	case <-k.ended():
		return k.shell.Process().Status()
	default:
		return 0, false
	}
}

func (k *bashContext) kill() {
	p := k.shell.Process()
	tree := p.Tree()
	defer tree.Close()
	tree.Kill()
	_ = p.SignalGroup(unix.SIGKILL)
	<-p.Done()
}

func (k *bashContext) close() {
	close(k.stop)
	k.runs.Wait()
	k.shell.Close()
}

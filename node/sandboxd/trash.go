// SPDX-License-Identifier: Apache-2.0

package sandboxd

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/wipe"
)

// trash removes trees that sandboxes left, behind everybody's back: a hostile one may hold millions of files, and
// neither a delete nor a start waits for that. What is in it when sandboxd dies, the next one removes.
type trash struct {
	dir    string
	log    *slog.Logger
	more   chan struct{}
	closed chan struct{}
	done   chan struct{}
}

func openTrash(dir string, log *slog.Logger) (*trash, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	t := &trash{dir: dir, log: log, more: make(chan struct{}, 1), closed: make(chan struct{}), done: make(chan struct{})}
	go t.run()
	return t, nil
}

// take makes path vanish at once; its content goes later.
func (t *trash) take(path string) error {
	name := fmt.Sprintf("%s-%d", filepath.Base(path), time.Now().UnixNano())
	err := os.Rename(path, filepath.Join(t.dir, name))
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case errors.Is(err, unix.EXDEV): // the directory of sockets lies elsewhere, and is small
		return wipe.Tree(path)
	case err != nil:
		return err
	}
	select {
	case t.more <- struct{}{}:
	default: // it will look anyway
	}
	return nil
}

func (t *trash) run() {
	defer close(t.done)
	for {
		t.empty()
		select {
		case <-t.more:
		case <-t.closed:
			t.empty()
			return
		}
	}
}

func (t *trash) empty() {
	entries, err := os.ReadDir(t.dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) { // removed with the whole state directory
		t.log.Error("left behind", "what", "trash", "error", err)
	}
	for _, entry := range entries {
		if err := wipe.Tree(filepath.Join(t.dir, entry.Name())); err != nil {
			t.log.Error("left behind", "what", "trash", "error", err)
		}
	}
}

// close waits for what is under way, though not for ever.
func (t *trash) close(patience time.Duration) {
	close(t.closed)
	select {
	case <-t.done:
	case <-time.After(patience):
	}
}

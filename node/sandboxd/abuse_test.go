// SPDX-License-Identifier: Apache-2.0

package sandboxd_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/launch"
	"opensandbox.io/node/wire"
)

// Budgets that no control group has: what one sandbox uses up must not be missing elsewhere.
func TestKernelBudgetsOfOneSandboxAreItsOwn(t *testing.T) {
	n := newNode(t)
	greedy, other := n.create(request("sleep", "infinity")), n.create(request("sleep", "infinity"))
	if got := greedy.out(`python3 -c '
import ctypes, os, time
libc = ctypes.CDLL(None)
held = 0
while libc.inotify_init1(0) >= 0:
    held += 1
if os.fork() == 0:
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    time.sleep(600)
print(held > 0)'`); got != "True" {
		t.Fatalf("the greedy one got nothing: %s", got)
	}
	if got := other.out(`python3 -c 'import ctypes; print(ctypes.CDLL(None).inotify_init1(0) >= 0)'`); got != "True" {
		t.Errorf("another sandbox has no inotify instance left: %s", got)
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	if err != nil {
		t.Errorf("root of the host has no inotify instance left: %v", err)
	} else {
		unix.Close(fd)
	}
	n.delete(greedy.ID)
	n.delete(other.ID)
	n.checkClean()
}

func TestTerminalsAreBounded(t *testing.T) {
	n := newNode(t)
	b := n.create(request("sleep", "infinity"))
	got := b.out(`python3 -c '
import os
held = []
try:
    while len(held) < 2000:
        held.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
except OSError as error:
    pass
print(len(held))'`)
	if got != "256" {
		t.Errorf("%s terminals", got)
	}
}

// Buffers of sockets count as memory, on v2 by themselves, on v1 by a limit of their own.
func TestSocketBuffersAreBounded(t *testing.T) {
	n := newNode(t)
	r := request("sleep", "infinity")
	r.Limits = &wire.Limits{MemoryBytes: 64 << 20}
	b := n.create(r)
	got := b.run(`python3 -c '
import socket
full = []
payload = b"x" * 60000
try:
    while len(full) < 4000:
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        receiver.bind(("127.0.0.1", 0))
        receiver.setblocking(False)
        sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sender.connect(receiver.getsockname())
        sender.send(payload)
        sender.close()
        receiver.recv(1, socket.MSG_PEEK)
        full.append(receiver)
except OSError:
    pass
print(len(full) * 60000)'`)
	var held int
	if _, err := fmt.Sscan(got.stdout, &held); err != nil {
		t.Logf("ended by the kernel: %+v", got.end)
	} else if held > 80<<20 {
		t.Errorf("at least %d bytes in buffers, with a limit of 64 MiB", held)
	}
	if err := b.ping(); err != nil {
		t.Error(err)
	}
}

// A slot that is not cleared away is passed over, and a create that fails leaves nothing that cannot be deleted.
func TestCreateWithSlotsInTheWay(t *testing.T) {
	n := newNode(t, "--shells", "0")
	var blocked []string
	for _, tree := range n.cgroups() {
		for slot := range 80 {
			dir := filepath.Join(tree, launch.SlotName(slot))
			if err := os.Mkdir(dir, 0o755); err == nil {
				blocked = append(blocked, dir)
			}
		}
	}
	if len(blocked) == 0 {
		t.Fatal("no control groups to stand in the way")
	}
	r := request("sleep", "infinity")
	if err := n.call("POST", "/sandboxes", r, nil); err == nil {
		t.Error("a create without any free slot succeeded")
	}
	wantCode(t, n.call("DELETE", "/sandboxes/"+r.ID, nil, nil), wire.CodeSandboxNotFound)
	for _, dir := range blocked {
		if strings.HasSuffix(dir, "/79") {
			continue
		}
		if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
	}
	b := n.create(request("sleep", "infinity"))
	if got := b.out("echo works"); got != "works" {
		t.Error(got)
	}
	n.delete(b.ID)
	for _, dir := range blocked {
		os.Remove(dir)
	}
	n.checkClean()
}

func TestSocketOfSandboxdIsNotForItsGroup(t *testing.T) {
	n := newNode(t)
	info, err := os.Stat(n.run + "/sandboxd.sock")
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v: ingress could make and end sandboxes", info.Mode())
	}
}

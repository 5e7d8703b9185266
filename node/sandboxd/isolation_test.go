// SPDX-License-Identifier: Apache-2.0

package sandboxd_test

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/wire"
)

func itoa(n int) string { return strconv.Itoa(n) }

func kill(pid int) { syscall.Kill(pid, syscall.SIGKILL) }

func TestTheHostIsInvisible(t *testing.T) {
	n := newNode(t)
	b := n.create(request())

	// Host processes: the test itself runs, and is not seen.
	if out := b.out("ls -d /proc/[0-9]* | wc -l"); atoi(out) > 6 {
		t.Errorf("%s processes are visible", out)
	}
	if out := b.run("grep -al 'sandboxd[.]test' /proc/[0-9]*/cmdline").stdout; out != "" {
		t.Errorf("a host process is visible: %s", out)
	}
	// Host files.
	secret := filepath.Join(n.dir, "secret")
	os.WriteFile(secret, []byte(token), 0o644)
	b.fails("cat " + secret)
	b.fails("cat /etc/shadow")
	b.fails("ls " + n.state)
	if out := b.out("ls -A /root /home /srv /mnt /media /boot /var/lib 2>/dev/null | grep -v : | grep -v '^$' | grep -v '^\\.' || true"); strings.Contains(out, "ssh") {
		t.Errorf("homes: %s", out)
	}
	// The host's network: a listener on the host's loopback and an abstract socket.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	b.fails(fmt.Sprintf("exec 3<>/dev/tcp/127.0.0.1/%d", l.Addr().(*net.TCPAddr).Port))
	if out := b.out("cat /proc/net/dev | tail -n +3 | cut -d: -f1 | tr -d ' '"); out != "lo" {
		t.Errorf("network devices: %q", out)
	}
	if out := b.out("ls /sys/class/net"); out != "lo" {
		t.Errorf("sysfs shows network devices %q", out)
	}
	// execd's own: environment, memory, open files, and the token anywhere.
	for _, path := range []string{"/proc/1/environ", "/proc/1/mem", "/proc/1/maps", "/proc/1/fd/4", "/proc/1/exe", "/proc/1/cwd/etc/passwd", "/proc/1/root/etc/passwd", "/proc/1/fdinfo/3", "/proc/1/io", "/proc/1/auxv"} {
		b.fails("head -c 1 " + path)
	}
	b.fails("ls /proc/1/fd/")
	b.fails("ls /proc/1/fdinfo/")
	b.fails("ls /proc/1/map_files/")
	b.fails("readlink /proc/1/exe")
	if out := b.run("grep -rasl " + token[:12] + " /proc/*/environ /etc /opt /root /workspace /tmp /run 2>/dev/null").stdout; out != "" {
		t.Errorf("the token or the host's environment is in %s", out)
	}
	if out := b.out("cat /proc/1/comm"); out != "execd" {
		t.Errorf("the first process is called %q", out)
	}
	// Nothing inside can end or stop execd.
	b.run("kill -9 1; kill -STOP 1")
	if err := b.ping(); err != nil {
		t.Errorf("execd: %v", err)
	}
	// No inherited open files in commands.
	if out := b.out("ls /proc/self/fd | tr '\\n' ' '"); out != "0 1 2 3 " {
		t.Errorf("open files of a command: %q", out)
	}
	// The paths of the host's own mounts do not show.
	if out := b.out("cat /proc/self/mountinfo"); strings.Contains(out, n.dir) {
		t.Errorf("mounts tell about the host:\n%s", out)
	}
	n.delete(b.ID)
}

func TestNamespacesRightsAndFilters(t *testing.T) {
	n := newNode(t)
	b := n.create(request())
	for _, name := range []string{"mnt", "pid", "net", "ipc", "uts", "user", "cgroup"} {
		ours, err := os.Readlink("/proc/self/ns/" + name)
		if err != nil {
			t.Fatal(err)
		}
		if theirs := b.out("readlink /proc/self/ns/" + name); theirs == ours {
			t.Errorf("%s namespace is the host's", name)
		}
	}
	status := b.out("cat /proc/self/status")
	for _, want := range []string{"CapEff:\t00000000000004fb", "CapPrm:\t00000000000004fb", "NoNewPrivs:\t1", "Seccomp:\t2", "SigIgn:\t0000000000000000", "SigBlk:\t0000000000000000"} {
		if !strings.Contains(status, want) {
			t.Errorf("no %q in the status of a command", want)
		}
	}
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", *b.PID))
	if len(tasks) < 2 {
		t.Fatalf("threads of execd: %v", tasks)
	}
	for _, path := range tasks {
		text, _ := os.ReadFile(path)
		for _, want := range []string{"CapEff:\t00000000000004fb", "NoNewPrivs:\t1", "Seccomp:\t2"} {
			if !strings.Contains(string(text), want) {
				t.Errorf("%s: no %q", path, want)
			}
		}
	}
	if out := b.out("cat /proc/self/uid_map"); !strings.Contains(out, "65536") {
		t.Errorf("uid map %q", out)
	}
	// A command may not become more than it is, nor change the machine.
	for _, command := range []string{
		"mount -t tmpfs none /mnt", "unshare -U true", "unshare -m true", "nsenter -t 1 -m true", "chroot / true",
		"mknod /tmp/disk b 254 0", "sysctl -w kernel.core_pattern=x", "echo x > /proc/sys/kernel/core_pattern",
		"echo x > /proc/sys/kernel/hostname", "echo b > /proc/sysrq-trigger && grep -q . /proc/sysrq-trigger", "touch /dev/planted", "touch /usr/planted",
		"hostname other", "head -c1 /proc/kcore | grep -q .", "grep -q . /proc/keys", "grep -q . /proc/kallsyms", "grep -q . /proc/interrupts", "ls /sys/firmware/* ", "echo 1 > /sys/kernel/uevent_helper",
		"date -s 2001-01-01", "swapoff -a && false", "ip link add dummy0 type dummy", "cat /dev/mem", "cat /dev/vda", "cat /dev/kmsg", "dmesg",
	} {
		b.fails(command)
	}
	mounts := b.out("cut -d' ' -f5,6 /proc/self/mountinfo")
	for path, want := range map[string]string{"/": "rw,nosuid,nodev", "/usr": "ro,nosuid,nodev", "/dev": "ro,nosuid,noexec", "/sys": "ro,nosuid,nodev,noexec", "/proc/sys": "ro,nosuid,nodev,noexec"} {
		if !strings.Contains("\n"+mounts, "\n"+path+" "+want) {
			t.Errorf("%s is not mounted %s:\n%s", path, want, mounts)
		}
	}
	// What must work.
	b.out("su -c true nobody 2>/dev/null || setpriv --reuid 65534 --regid 65534 --clear-groups true")
	b.out("chown 1000:1000 /workspace && touch /etc/own /usr/local/own && echo x > /dev/null && head -c1 /dev/urandom >/dev/null")
	b.out("python3 -c 'import socket; s=socket.socket(); s.bind((\"127.0.0.1\", 80)); import pty; pty.openpty()'")
	if out := b.out("ulimit -c"); out != "0" {
		t.Errorf("core files: %s", out)
	}
	// A file made inside belongs to id 0 on disk, is set-user-id there, and can be neither reached nor run.
	b.out("cp /usr/bin/id /workspace/planted && chown 0:0 /workspace/planted && chmod 6755 /workspace/planted")
	planted := filepath.Join(n.state, "fs/sandboxes", b.ID, "upper/workspace/planted")
	info, err := os.Stat(planted)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode()&os.ModeSetuid == 0 || info.Sys().(*syscall.Stat_t).Uid != 0 {
		t.Errorf("planted file is %v of %d: the test does not test what it says", info.Mode(), info.Sys().(*syscall.Stat_t).Uid)
	}
	if out, err := asNobody("/bin/sh", "-c", "ls "+n.state+"/fs; "+planted); err == nil {
		t.Errorf("another user of the host runs it: %s", out)
	}
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", n.process.Process.Pid))
	plain := false
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, n.state+"/fs ") {
			plain = strings.Contains(line, "nosuid") && strings.Contains(line, "nodev")
		}
	}
	if !plain {
		t.Errorf("the files of sandboxes are not on a nosuid,nodev mount:\n%s", text)
	}
	n.delete(b.ID)
}

func TestTheReportTellsTheTruth(t *testing.T) {
	n := newNode(t)
	r := request()
	r.Limits = &wire.Limits{CPUMillis: 500, MemoryBytes: 256 << 20, Pids: 99}
	b := n.create(r)
	limits := b.Isolation["limits"].(map[string]any)
	for name, want := range map[string]string{"cpu": "500m", "memory": "256Mi", "pids": "99"} {
		got := limits[name].(map[string]any)
		if got["value"] != want || !strings.HasPrefix(got["means"].(string), "cgroup v") {
			t.Errorf("%s: %v", name, got)
		}
	}
	if disk := limits["disk"].(map[string]any); disk["means"] != "none" {
		t.Errorf("disk: %v", disk)
	}
	if network := b.Isolation["network"].(map[string]any); network["means"] != "none: only loopback inside" {
		t.Errorf("network: %v", network)
	}
	// The kernel agrees.
	for _, c := range []struct{ v1, v2, want string }{
		{"memory.limit_in_bytes", "memory.max", "268435456"}, {"pids.max", "pids.max", "99"}, {"cpu.cfs_quota_us", "cpu.max", "50000"},
	} {
		if got, _, _ := strings.Cut(n.ofPayload(*b.PID, c.v1, c.v2), " "); got != c.want {
			t.Errorf("%s is %s, not %s", c.v1, got, c.want)
		}
	}
	n.delete(b.ID)
}

func TestBombsEndTheCommandNotTheSandbox(t *testing.T) {
	n := newNode(t)
	r := request()
	r.Limits = &wire.Limits{CPUMillis: 1000, MemoryBytes: 64 << 20, Pids: 64}
	b := n.create(r)

	memory := b.run("python3 -c 'x=bytearray(512<<20)'")
	if memory.end.Reason != wire.CommandEndReasonOutOfMemory {
		t.Errorf("memory bomb: %+v %s", memory.end, memory.stderr)
	}
	if err := b.ping(); err != nil {
		t.Errorf("execd after the memory bomb: %v", err)
	}

	done := make(chan result, 1)
	go func() {
		done <- b.run("timeout -s KILL 3 python3 -c '\nimport os\nwhile True:\n  try: os.fork()\n  except OSError: pass\n'; true")
	}()
	began := time.Now()
	for pings := 0; pings < 10; pings++ {
		if err := b.ping(); err != nil {
			t.Errorf("execd during the fork bomb: %v", err)
		}
	}
	t.Logf("10 pings during the fork bomb took %v", time.Since(began))
	select {
	case <-done:
	case <-time.After(patience):
		t.Error("the fork bomb does not end")
	}
	n.delete(b.ID)
	n.checkClean()
}

func atoi(s string) int {
	n, _ := strconv.Atoi(strings.TrimSpace(s))
	return n
}

// A program may nest directories deeper than sandboxd may have files open; they must go with the sandbox.
func TestBottomlessTreeIsRemoved(t *testing.T) {
	n := newNode(t)
	b := n.create(request("sleep", "infinity"))
	var limit unix.Rlimit
	if err := unix.Prlimit(n.pid(), unix.RLIMIT_NOFILE, nil, &limit); err != nil {
		t.Fatal(err)
	}
	few := limit
	few.Cur = 256 // instead of a tree that takes long to make
	if err := unix.Prlimit(n.pid(), unix.RLIMIT_NOFILE, &few, nil); err != nil {
		t.Fatal(err)
	}
	if out := b.out(`python3 -c '
import os
for _ in range(1000):
    os.mkdir("d")
    os.chdir("d")
print("deep")'`); out != "deep" {
		t.Fatal(out)
	}
	n.delete(b.ID)
	n.checkClean()
}

// The sandbox's root may signal pid 1. execd outlives that, and what is meant for the entry point gets there.
func TestSignalsToPidOne(t *testing.T) {
	n := newNode(t)
	b := n.create(request("sh", "-c", `for s in TERM INT HUP QUIT USR1 USR2; do trap "echo $s >>/tmp/got" $s; done
echo >/tmp/ready; while :; do sleep 1000 & wait $!; done`))
	b.out("until [ -e /tmp/ready ]; do sleep 0.01; done")
	for signal := 1; signal <= 31; signal++ {
		if got := b.out(fmt.Sprintf("kill -%d 1; echo sent", signal)); got != "sent" {
			t.Fatalf("signal %d: %q", signal, got)
		}
		if err := b.ping(); err != nil {
			t.Fatalf("after signal %d: %v", signal, err)
		}
	}
	if got := b.out("until [ $(wc -l </tmp/got) -ge 6 ]; do sleep 0.01; done; sort /tmp/got | tr '\n' ' '"); got != "HUP INT QUIT TERM USR1 USR2 " {
		t.Errorf("the entry point got %q", got)
	}
	// A program must not have learned from pid 1 to ignore them.
	if got := b.out(`sh -c 'kill -TERM $$'; echo $?; grep SigIgn /proc/self/status`); got != "143\nSigIgn:\t0000000000000000" {
		t.Errorf("%q", got)
	}
	n.delete(b.ID)
	// One that does not expect it ends, and the sandbox with it.
	b = n.create(request("sleep", "infinity"))
	_ = b.call("POST", "/command", wire.RunCommandRequest{Command: "kill -TERM 1; sleep 1000"}, nil)
	if r := n.ended(b.ID); r.End.Reason != wire.NodeEndReasonSignalled || r.End.Signal != "SIGTERM" {
		t.Errorf("it ended with %+v", r.End)
	}
	n.delete(b.ID)
	n.checkClean()
}

// SPDX-License-Identifier: Apache-2.0

package sandboxd_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"opensandbox.io/node/wire"
)

// somebody is a user of no importance.
const somebody = 23456

func rootlessNode(t *testing.T) *node {
	t.Helper()
	if text, err := os.ReadFile("/proc/sys/user/max_user_namespaces"); err == nil && strings.TrimSpace(string(text)) == "0" {
		t.Skip("SKIPPED: this host forbids user namespaces (user.max_user_namespaces=0)")
	}
	n := prepareNode(t, "--shells", "1")
	n.as = &syscall.Credential{Uid: somebody, Gid: somebody}
	for _, path := range []string{n.dir, n.state, n.state + "/instance"} {
		if err := os.Chown(path, somebody, somebody); err != nil {
			t.Fatal(err)
		}
	}
	n.start()
	return n
}

func TestRootless(t *testing.T) {
	n := rootlessNode(t)
	if n.process.Wait() != nil {
		t.Errorf("the process that was started: %v", n.process.ProcessState)
	}
	var host wire.Host
	if err := n.call("GET", "/host", nil, &host); err != nil || !host.Rootless || len(host.Missing) == 0 {
		t.Fatalf("host %+v, %v", host, err)
	}
	b := n.create(request("sh", "-c", "echo up; exec sleep infinity"))
	if b.Isolation["rootless"] != true || len(b.Isolation["missing"].([]any)) == 0 {
		t.Errorf("isolation %v", b.Isolation)
	}
	if limits := b.Isolation["limits"].(map[string]any); host.Cgroup == wire.HostCgroupNone && limits["memory"].(map[string]any)["means"] != "none" {
		t.Errorf("a limit nobody enforces is reported: %v", limits)
	}
	if out := b.out("id -u; touch /etc/own /usr/local/own /workspace/own; cat /proc/self/uid_map | tr -s ' '; ls /sys/class/net"); out != "0\n 0 0 1\nlo" {
		t.Errorf("output %q", out)
	}
	status := b.out("cat /proc/self/status")
	for _, want := range []string{"CapEff:\t00000000000004fb", "NoNewPrivs:\t1", "Seccomp:\t2"} {
		if !strings.Contains(status, want) {
			t.Errorf("no %q in the status of a command", want)
		}
	}
	secret := filepath.Join(n.dir, "secret")
	os.WriteFile(secret, []byte(token), 0o644)
	for _, command := range []string{"cat " + secret, "mount -t tmpfs none /mnt", "unshare -U true", "head -c1 /proc/1/mem", "readlink /proc/1/exe", "cat /proc/1/environ"} {
		b.fails(command)
	}
	if out := b.out("cat /proc/self/mountinfo"); strings.Contains(out, n.dir) {
		t.Errorf("mounts tell about the host:\n%s", out)
	}
	n.kill()
	if err := b.ping(); err != nil {
		t.Fatalf("the sandbox did not survive: %v", err)
	}
	n.start()
	if r, err := n.get(b.ID); err != nil || r.State != wire.ReportStateRunning || *r.PID != *b.PID {
		t.Fatalf("adopted %+v, %v", r, err)
	}
	n.delete(b.ID)
	// Of shells that wait, now and in a sandbox's place, too.
	n.shells(1)
	n.checkClean()
	shell := n.create(request())
	if !pooled(shell.Report) || shell.out("hostname") != shell.ID[:12] {
		t.Errorf("timings %v, host name %q", shell.Timings, shell.out("hostname"))
	}
	n.delete(shell.ID)
	n.checkClean()
}

func TestWithoutUserNamespacesTheMissingRightIsNamed(t *testing.T) {
	// A user namespace in which no other may be made stands for a host that forbids them.
	dir := t.TempDir()
	os.Chmod(dir, 0o777)
	command := exec.Command("/bin/sh", "-c",
		"echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --reuid 1000 --regid 1000 --clear-groups "+programs+"/sandboxd --state-dir "+dir)
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 300000, Size: 65536}}
	command.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids, GidMappingsEnableSetgroups: true,
		Credential: &syscall.Credential{},
	}
	out, err := command.CombinedOutput()
	if err == nil {
		t.Fatalf("it started: %s", out)
	}
	for _, want := range []string{string(wire.CodeNodeUnsupportedHost), "sysctl user.max_user_namespaces=", `"error"`} {
		if !strings.Contains(string(out), want) {
			t.Errorf("no %s in %s", want, out)
		}
	}
}

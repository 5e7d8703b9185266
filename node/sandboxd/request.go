// SPDX-License-Identifier: Apache-2.0

package sandboxd

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"opensandbox.io/node/cgroup"
	"opensandbox.io/node/hostimage"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

// Bounds of a request. Below the lower ones nothing starts; above the upper ones a number is a mistake.
const (
	minCPU, maxCPU       = 10, 1024 * 1000
	minMemory, maxMemory = 16 << 20, 16 << 40
	minPids, maxPids     = 8, 4 << 20

	maxWords  = 1024
	maxWord   = 128 << 10 // the kernel's own bound of one argument
	maxEnv    = 4096
	maxBytes  = 1 << 20 // entry point and environment together
	maxFuture = 10 * 365 * 24 * time.Hour
)

// defaultLimits apply where a request names none.
var defaultLimits = cgroup.Limits{CPUMillis: 1000, MemoryBytes: 2 << 30, Pids: 1024}

// plan is a request that was checked and completed.
type plan struct {
	request *wire.LaunchRequest
	image   string
	limits  cgroup.Limits
	profile string
	env     []string
}

// check turns a request into a plan, or says what is wrong with it.
func check(r *wire.LaunchRequest, now time.Time) (*plan, error) {
	if !isUUID(r.ID) {
		return nil, invalid("id %q is not a UUID in lower case.", short(r.ID))
	}
	if raw, err := hex.DecodeString(r.TokenSHA256); err != nil || len(raw) != 32 {
		return nil, invalid("tokenSha256 must be 64 hex digits.")
	}
	if r.Generation < 0 {
		return nil, invalid("generation must not be negative.")
	}
	if !r.Deadline.IsZero() {
		if !r.Deadline.After(now) {
			return nil, reply.Errorf(wire.CodeSandboxInvalidExpiration, "The deadline %s has passed.", r.Deadline.Format(time.RFC3339))
		}
		if r.Deadline.After(now.Add(maxFuture)) {
			return nil, reply.Errorf(wire.CodeSandboxInvalidExpiration, "The deadline %s is more than ten years away.", r.Deadline.Format(time.RFC3339))
		}
	}
	p := &plan{request: r, profile: string(r.Profile)}
	switch r.Profile {
	case "":
		p.profile = string(wire.LaunchRequestProfileStrict)
	case wire.LaunchRequestProfileStrict, wire.LaunchRequestProfileNested, wire.LaunchRequestProfileIsolated:
	default:
		return nil, invalid("profile must be strict, nested or isolated, not %q.", short(p.profile))
	}
	if !hostimage.Resolve(r.Image) {
		return nil, unknownImage(r.Image)
	}
	p.image = "host"
	var err error
	if p.limits, err = checkLimits(r.Limits); err != nil {
		return nil, err
	}
	if err := checkWords(r); err != nil {
		return nil, err
	}
	p.env = environment(r.Env)
	return p, nil
}

func checkLimits(l *wire.Limits) (cgroup.Limits, error) {
	limits := defaultLimits
	if l == nil {
		return limits, nil
	}
	for _, one := range []struct {
		name            string
		given           int64
		lowest, highest int64
		set             *int64
	}{
		{"cpuMillis", l.CPUMillis, minCPU, maxCPU, &limits.CPUMillis},
		{"memoryBytes", l.MemoryBytes, minMemory, maxMemory, &limits.MemoryBytes},
		{"pids", l.Pids, minPids, maxPids, &limits.Pids},
	} {
		if one.given == 0 {
			continue
		}
		if one.given < one.lowest || one.given > one.highest {
			return limits, invalid("limits.%s must lie between %d and %d, not be %d.", one.name, one.lowest, one.highest, one.given)
		}
		*one.set = one.given
	}
	return limits, nil
}

func checkWords(r *wire.LaunchRequest) error {
	entrypoint := func(format string, args ...any) error {
		return reply.Errorf(wire.CodeSandboxInvalidEntrypoint, format, args...)
	}
	if len(r.Entrypoint) == 0 || r.Entrypoint[0] == "" {
		return entrypoint("The entry point is empty.")
	}
	if len(r.Entrypoint) > maxWords {
		return entrypoint("The entry point has more than %d words.", maxWords)
	}
	total := 0
	for i, word := range r.Entrypoint {
		if strings.ContainsRune(word, 0) || len(word) >= maxWord {
			return entrypoint("Word %d of the entry point holds a NUL byte or is longer than %d bytes.", i, maxWord)
		}
		total += len(word)
	}
	if len(r.Env) > maxEnv {
		return invalid("env has more than %d variables.", maxEnv)
	}
	for name, value := range r.Env {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.ContainsRune(value, 0) || len(name)+len(value) >= maxWord {
			return invalid("env %q is not a variable: no name, an = in it, a NUL byte, or longer than %d bytes.", short(name), maxWord)
		}
		total += len(name) + len(value)
	}
	if total > maxBytes {
		return invalid("Entry point and env together are larger than %d bytes.", maxBytes)
	}
	return nil
}

// environment is the image's with the request's on top, each name once.
func environment(given map[string]string) []string {
	merged := map[string]string{}
	for _, variable := range hostimage.Env() {
		name, value, _ := strings.Cut(variable, "=")
		merged[name] = value
	}
	maps.Copy(merged, given)
	env := make([]string, 0, len(merged))
	for _, name := range slices.Sorted(maps.Keys(merged)) {
		env = append(env, name+"="+merged[name])
	}
	return env
}

func unknownImage(name string) error {
	var there []string
	for _, image := range hostimage.Aliases() {
		there = append(there, image.Name)
	}
	return reply.Errorf(wire.CodeImageNotFound, "No image %q here; there are: %s.", short(name), strings.Join(there, ", ")).
		WithHint("Use one of these. Images cannot be loaded on this node yet: install what is missing on the host, below /usr, and the image host has it.")
}

func invalid(format string, args ...any) error {
	return reply.Errorf(wire.CodeSandboxInvalidParameter, format, args...)
}

// short keeps what a caller sent from filling a log.
func short(s string) string {
	if len(s) > 100 {
		return s[:100] + "…"
	}
	return s
}

// isUUID wants the canonical form: ids become names of files and control groups.
func isUUID(s string) bool {
	if len(s) != 36 {
		return false
	}
	for i, c := range []byte(s) {
		switch i {
		case 8, 13, 18, 23:
			if c != '-' {
				return false
			}
		default:
			if !('0' <= c && c <= '9' || 'a' <= c && c <= 'f') {
				return false
			}
		}
	}
	return true
}

// newUUID is a random one.
func newUUID() string {
	b := make([]byte, 16)
	rand.Read(b)
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// quantity writes bytes the way people read them, exactly.
func quantity(bytes int64) string {
	for _, unit := range []struct {
		name string
		size int64
	}{{"Gi", 1 << 30}, {"Mi", 1 << 20}, {"Ki", 1 << 10}} {
		if bytes%unit.size == 0 {
			return fmt.Sprintf("%d%s", bytes/unit.size, unit.name)
		}
	}
	return fmt.Sprint(bytes)
}

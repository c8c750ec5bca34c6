package process

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestGetenvTakesTheLast(t *testing.T) {
	p := &Process{Environ: []string{"A=1", "B", "A=2=3", "AA=4"}}
	assert.Equal(t, "2=3", p.Getenv("A"))
	assert.Empty(t, p.Getenv("B"))
}

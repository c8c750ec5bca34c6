// Program host imports everything that needs no GPU backend. It must carry no kernels.
package main

import (
	"fmt"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

func main() {
	_, _ = fmt.Println(symmem.Open, symmem.OpenLocal, host.Name, kernels.NewAllReduce, tensor.Float32)
}

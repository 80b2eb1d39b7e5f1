/* The cycle's verbs under the names that NeMo-RL's training loops call. */
#include "controller/cycle.h"

refit_status refit_offload_before_refit(refit_controller *controller, refit_stream_ref after,
                                        refit_error *error)
{
    return refit_controller_clear(controller, after, error);
}

refit_status refit_offload_after_refit(refit_controller *controller, refit_stream_ref after,
                                       refit_error *error)
{
    refit_controller_state state = refit_controller_get_state(controller);
    if (state == REFIT_CLEARED || state == REFIT_REFITTED) return REFIT_OK;
    return refit_controller_clear(controller, after, error);
}

refit_status refit_prepare_for_training(refit_controller *controller, refit_stream_ref stream,
                                        refit_error *error)
{
    RFT_TRY(refit_controller_return(controller, stream, error));
    return refit_controller_join(controller, stream, error);
}
